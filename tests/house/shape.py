"""Circles, floors and upward imports of a graph of imports."""

from __future__ import annotations

from collections.abc import Iterable

Graph = dict[str, set[str]]


def circles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that reach each other, the largest first."""
    return sorted((sorted(part) for part in _components(graph) if len(part) > 1), key=len, reverse=True)


def floors(graph: Graph) -> int:
    """Nodes on the longest way down, upward edges left out."""
    against = set(upward(graph))
    down = {node: {target for target in targets if (node, target) not in against} for node, targets in graph.items()}
    return max(_floor_of(down).values(), default=0)


def upward(graph: Graph) -> list[tuple[str, str]]:
    """Edges that run against the order of their circle with the fewest such edges that a greedy search finds."""
    found = []
    for circle in circles(graph):
        order = {node: i for i, node in enumerate(_ordered(circle, graph))}
        found += [(a, b) for a in circle for b in sorted(graph[a]) if b in order and order[b] < order[a]]
    return found


def between(graph: Graph, room_of: dict[str, str]) -> Graph:
    """The graph of rooms that the graph of modules makes."""
    rooms: Graph = {room: set() for room in room_of.values()}
    for source, targets in graph.items():
        rooms[room_of[source]] |= {room_of[target] for target in targets} - {room_of[source]}
    return rooms


def _components(graph: Graph) -> list[set[str]]:
    """Tarjan's strongly connected components, those that import nothing of the others first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
            if target in stack:
                low[node] = min(low[node], low[target])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(set(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def _floor_of(graph: Graph) -> dict[str, int]:
    floor: dict[str, int] = {}
    for (node,) in _components(graph):
        floor[node] = 1 + max((floor[target] for target in graph[node] - {node}), default=0)
    return floor


def _ordered(circle: Iterable[str], graph: Graph) -> list[str]:
    """Importers before what they import, as far as that goes (Eades, Lin and Smyth)."""
    left = set(circle)
    front: list[str] = []
    back: list[str] = []
    while left:
        out = {n: len(graph[n] & left - {n}) for n in left}
        into = {n: sum(n in graph[m] for m in left if m != n) for n in left}
        sinks = sorted(n for n in left if not out[n])
        sources = sorted(n for n in left if not into[n])
        if sinks:
            back.insert(0, sinks[0])
        elif sources:
            front.append(sources[0])
        else:
            front.append(max(sorted(left), key=lambda n: out[n] - into[n]))
        left -= {*front, *back}
    return front + back

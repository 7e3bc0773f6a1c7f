"""Where converted regions go: output files, a model's tensors, or a comparison."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NoReturn

from kconv.engine.slabs import Part, Region, Slab
from kconv.errors import BadData, KconvError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class Sink(ABC):
    """Takes converted regions from any number of threads; what is not abstract has a default that fits most sinks."""

    takes_tensors = False
    """Whether regions come to `put_tensor`, from whatever device they are on, and not to `put`."""

    @abstractmethod
    def put(self, region: Region, data: np.ndarray) -> str:
        """Take a region's bytes (uint8, 1-D); returns their digest."""

    def put_tensor(self, region: Region, tensor: Tensor) -> str:
        """Take a region as a tensor of its spec; returns its digest."""
        raise NotImplementedError

    def put_zeros(self, region: Region) -> str | None:
        """Take a region known to be zero bytes; None when the sink wants to see them."""
        return None

    def lend(self, region: Region) -> np.ndarray | None:
        """The region's final place as bytes on the CPU, to be filled in place; None where there is none."""
        return None

    def lend_on_device(self, region: Region) -> Tensor | None:
        """The region's final place on a GPU, flat; None where there is none."""
        return None

    def begin(self, part: Part) -> None:
        """Hear of every part, in the order in which they are handed out."""

    def finished(self, slab: Slab) -> None:
        """Hear that all regions of a slab were taken."""

    def refused(self, part: Part, error: BadData) -> None:
        """Hear that a part's data cannot be converted, which ends the run unless a sink goes on."""
        refuse(part, error)


def refuse(part: Part, error: BadData) -> NoReturn:
    """Raise what a user reads of bad data."""
    hint = error.hint or "nothing looks finished; the source tensor itself is at fault"
    raise KconvError(located(error, part), hint=hint) from error


def located(error: BadData, part: Part) -> str:
    """The message of bad data with tensor, file and position in the whole tensor."""
    region = part.reads[error.operand]
    position = list(error.position)
    if position:
        position[0] += region.first_row
    return f"{region.name} in {region.file}, position {position}: {error.message}"

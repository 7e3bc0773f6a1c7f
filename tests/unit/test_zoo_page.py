"""The zoo page: sound HTML without outside resources, and in headless Chromium no error, no overflow, every card reachable."""

from __future__ import annotations

import functools
import html
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kconv.zoo.cards import card_ids, load_card
from kconv.zoo.page import write_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
VOID = {"meta", "link", "input", "br"}
# A page that frames the zoo at a phone's and a desktop's width and writes down what it finds.
PROBE = """<!doctype html><body><iframe id="f" style="border:0;height:800px"></iframe><script>
var found={};
function look(width,then){
  var f=document.getElementById('f');f.style.width=width+'px';
  f.onload=function(){var d=f.contentDocument,w=f.contentWindow;d.documentElement.style.scrollBehavior='auto';
    var wide=[].filter.call(d.querySelectorAll('body *'),function(e){
      var r=e.getBoundingClientRect();return r.width&&!e.closest('.chips')&&(r.right>width+1||r.left<-1)});
    var cards=[].map.call(d.querySelectorAll('article'),function(a){return a.id});
    var reached=cards.filter(function(id){
      var links=d.querySelectorAll('nav a[href="#'+id+'"]');if(links.length!==1)return false;
      links[0].click();var top=d.getElementById(id).getBoundingClientRect().top;
      return w.location.hash==='#'+id&&top<800});
    var search=d.getElementById('search');search.value='nvfp4';search.dispatchEvent(new w.Event('input'));
    var some=d.querySelectorAll('article:not([hidden])').length;
    search.value='no such thing';search.dispatchEvent(new w.Event('input'));
    var none=!d.getElementById('none').hidden&&d.querySelectorAll('article:not([hidden])').length===0;
    search.value='';search.dispatchEvent(new w.Event('input'));
    d.querySelector('[data-filter=dspark]').click();
    var chip=d.querySelectorAll('article:not([hidden])').length;
    var smallest=[].reduce.call(d.querySelectorAll('article p, dd, dt, summary, article code, .badge'),
      function(m,e){return Math.min(m,parseFloat(w.getComputedStyle(e).fontSize))},99);
    found[width]={scroll:d.documentElement.scrollWidth,wide:wide.map(function(e){return e.outerHTML.slice(0,80)}),
      cards:cards,reached:reached,some:some,none:none,chip:chip,smallest:smallest};
    then()};
  f.src='index.html?'+width}
window.onerror=function(m){found.error=m};
look(390,function(){look(1280,function(){document.title='done';
  var p=document.createElement('pre');p.textContent=JSON.stringify(found);document.body.appendChild(p)})});
</script></body>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assert write_page(folder)["cards"] == len(card_ids())
    (folder / "probe.html").write_text(PROBE)
    return folder


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


class Structure(HTMLParser):
    """Collects ids, links and outside resources; every tag must be closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name == "href" and tag == "a":
                self.links.append(value or "")
            if name in ("src", "srcset") or (name == "href" and tag == "link" and value != "data:,"):
                self.outside.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_structure(site: Path) -> None:
    text = (site / "index.html").read_text(encoding="utf-8")
    page = Structure()
    page.feed(text)
    assert page.open == []
    assert page.outside == []
    assert len(page.ids) == len(set(page.ids))
    assert set(card_ids()) <= set(page.ids)
    anchors = {link[1:] for link in page.links if link.startswith("#")}
    assert set(card_ids()) <= anchors <= set(page.ids)
    hub = [link for link in page.links if not link.startswith("#")]
    assert all(re.fullmatch(r"https://huggingface\.co/[\w.-]+/[\w.-]+(/tree/[0-9a-f]{40})?", link) for link in hub)
    for name in card_ids():
        data = load_card(name).data
        for words in [data["summary"], *data["traps"], *(i["what"] for i in data["verification"])]:
            assert html.escape(words) in text


def chromium(*arguments: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=20000"]
    return subprocess.run([CHROMIUM, *flags, *arguments], capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_in_a_browser(url: str) -> None:
    done = chromium("--dump-dom", f"{url}/probe.html")
    assert "CONSOLE" not in done.stderr, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    match = re.search(r"<pre>(.*)</pre>", done.stdout)
    assert match, done.stdout[-500:]
    found = json.loads(html.unescape(match[1]))
    assert "error" not in found
    for width in ("390", "1280"):
        at = found[width]
        assert at["scroll"] <= int(width), "the page scrolls sideways"
        assert at["wide"] == []
        assert sorted(at["cards"]) == card_ids()
        assert sorted(at["reached"]) == card_ids()
        assert 0 < at["some"] < len(card_ids())
        assert at["none"]
        assert at["chip"] == sum(load_card(n).data["family"] == "dspark" for n in card_ids())
        assert at["smallest"] >= 12

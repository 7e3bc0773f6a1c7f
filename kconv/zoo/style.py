"""Style and script of the zoo page."""

STYLE = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#171b22;--soft:#556070;--line:#dfe3e9;--link:#0b5c8a;--code:#eef1f5;
--ok:#12703c;--okbg:#e2f4e9;--open:#8a5a00;--openbg:#fdf1d9;--no:#9b2226;--nobg:#fbe4e4;--accent:#0b5c8a}
@media (prefers-color-scheme:dark){:root{--bg:#101318;--card:#181c23;--ink:#e6e9ee;--soft:#9aa5b4;--line:#2b313b;
--link:#7cc4ef;--code:#0f1217;--ok:#7fdca4;--okbg:#15301f;--open:#f0c36a;--openbg:#33270f;--no:#f19a9a;--nobg:#3a1a1c;
--accent:#7cc4ef}}
*{box-sizing:border-box}
html{scroll-behavior:smooth;scroll-padding-top:7.5rem;-webkit-text-size-adjust:100%}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",
Arial,sans-serif}
a{color:var(--link);text-decoration:none}a:hover,a:focus-visible{text-decoration:underline}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
.top,nav,main,footer,.tools{max-width:78rem;margin:0 auto;padding:0 1rem}
.top{padding-top:2rem}
h1{font-size:1.9rem;line-height:1.2;margin:0 0 .5rem;letter-spacing:-.01em}
.top p{max-width:46rem;margin:.4rem 0;color:var(--soft)}
.totals b{color:var(--ink);font-size:1.15rem;margin-left:.9rem}.totals b:first-child{margin-left:0}
.tools{position:sticky;top:0;z-index:2;background:var(--bg);padding-top:.7rem;padding-bottom:.7rem;display:flex;flex-wrap:wrap;
gap:.5rem;align-items:center;border-bottom:1px solid var(--line)}
.tools[hidden]{display:none}
.tools label{position:absolute;width:1px;height:1px;overflow:hidden;clip:rect(0 0 0 0)}
#search{flex:1 1 16rem;min-width:0;font:inherit;padding:.5rem .8rem;border:1px solid var(--line);border-radius:.5rem;
background:var(--card);color:inherit}
.chips{display:flex;gap:.35rem;overflow-x:auto;padding:2px;max-width:100%;scrollbar-width:thin}
.chips button{font:inherit;font-size:.87rem;white-space:nowrap;padding:.3rem .75rem;border-radius:99px;
border:1px solid var(--line);background:var(--card);color:inherit;cursor:pointer}
.chips button.on{background:var(--accent);border-color:var(--accent);color:var(--bg)}
#none{margin:0;width:100%;color:var(--soft)}
nav{margin-top:1rem}
nav summary{cursor:pointer;font-weight:600}
nav ul{list-style:none;margin:.5rem 0 0;padding:0}
nav li{margin:.45rem 0;line-height:2}
nav li span{display:inline-block;color:var(--soft);font-size:.87rem;margin-right:.3rem}
nav a{display:inline-block;background:var(--card);border:1px solid var(--line);border-radius:.4rem;padding:0 .55rem;
font-size:.87rem;line-height:1.75;margin-right:.15rem}
h2{font-size:1.3rem;margin:2rem 0 .8rem}
.grid{display:grid;grid-template-columns:minmax(0,1fr);gap:1rem;align-items:start}
@media (min-width:56rem){.grid{grid-template-columns:repeat(2,minmax(0,1fr))}}
article{background:var(--card);border:1px solid var(--line);border-radius:.7rem;padding:1rem 1.1rem;min-width:0}
article:target{border-color:var(--accent);box-shadow:0 0 0 1px var(--accent)}
article[hidden],section[hidden]{display:none}
article h3{margin:0;font-size:1.1rem;line-height:1.3}article h3 a{color:inherit}
article p{margin:.45rem 0}
.repo{font-size:.9rem;overflow-wrap:anywhere}.repo span{color:var(--soft)}
.badges{display:flex;flex-wrap:wrap;gap:.35rem}
.badge{font-size:.8rem;border-radius:99px;padding:.05rem .6rem;background:var(--code);color:var(--soft)}
.badge.verified{background:var(--okbg);color:var(--ok)}.badge.unverified{background:var(--openbg);color:var(--open)}
.badge.unsupported{background:var(--nobg);color:var(--no)}
dl{margin:.7rem 0 .3rem;font-size:.93rem}
dl div{display:grid;grid-template-columns:6.2rem minmax(0,1fr);gap:.6rem;padding:.22rem 0;border-top:1px solid var(--line)}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}dd ul{margin:0;padding-left:1.1rem}
details{border-top:1px solid var(--line);padding:.35rem 0;font-size:.93rem}
nav details{border:0;padding:0;font-size:1rem}
details summary{cursor:pointer;font-weight:600;padding:.15rem 0}
details ul{margin:.4rem 0;padding-left:1.2rem}details li{margin:.3rem 0;overflow-wrap:anywhere}
.proof ul{list-style:none;padding-left:0}
.proof li{margin:.7rem 0}.proof li span{display:block;color:var(--soft)}
b.verified{color:var(--ok)}b.unverified{color:var(--open)}b.unsupported{color:var(--no)}b.not_applicable{color:var(--soft)}
code{font:.85em/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:var(--code);border-radius:.3rem;
padding:.1em .35em}
article code{display:block;white-space:pre-wrap;overflow-wrap:anywhere;padding:.4em .6em;margin:.25rem 0}
footer{padding-top:1.5rem;padding-bottom:3rem;color:var(--soft);font-size:.9rem}
@media (max-width:30rem){h1{font-size:1.55rem}article{padding:.9rem}dl div{grid-template-columns:5.2rem minmax(0,1fr)}
.totals b{margin-left:.5rem}}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
@media print{.tools,nav{display:none}}
"""

SCRIPT = """
(function(){
var tools=document.querySelector('.tools'),search=document.getElementById('search'),none=document.getElementById('none');
var cards=[].slice.call(document.querySelectorAll('article')),family='';
tools.hidden=false;
if(window.matchMedia('(max-width: 40rem)').matches)document.querySelector('nav details').open=false;
function show(){
  var words=search.value.toLowerCase().split(/\\s+/).filter(Boolean),found=0;
  cards.forEach(function(card){
    var fits=(!family||card.dataset.family===family)&&words.every(function(w){return card.dataset.words.indexOf(w)>=0});
    card.hidden=!fits;if(fits)found++;
  });
  [].forEach.call(document.querySelectorAll('main section'),function(s){s.hidden=!s.querySelector('article:not([hidden])')});
  none.hidden=found>0;
}
function clear(){search.value='';family='';mark();show()}
function mark(){[].forEach.call(document.querySelectorAll('.chips button'),function(b){
  var on=b.dataset.filter===family;b.classList.toggle('on',on);b.setAttribute('aria-pressed',on)})}
document.querySelector('.chips').addEventListener('click',function(e){
  if(e.target.dataset.filter===undefined)return;family=e.target.dataset.filter;mark();show()});
search.addEventListener('input',show);
document.addEventListener('click',function(e){
  var link=e.target.closest('a[href^="#"]');if(!link)return;
  var card=document.getElementById(link.getAttribute('href').slice(1));if(card&&card.hidden)clear()});
mark();
})();
"""

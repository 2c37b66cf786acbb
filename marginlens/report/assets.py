"""Style and script of the report's page, which carries both: it works from a disk, without a network."""

from __future__ import annotations

COLOURS = 8
"""Of lines and marks: --c0 to --c7."""

INK = """
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--soft:#5c6670;--rule:#d9dde2;--wash:#f3f5f7;--link:#0b62b0;
--bad:#b3261e;--c0:#1f6fb4;--c1:#d1495b;--c2:#2a9d6f;--c3:#b5760b;--c4:#7d5bb0;--c5:#00838f;--c6:#8d6e63;--c7:#607d8b}
@media(prefers-color-scheme:dark){:root{--ink:#e4e7eb;--paper:#14171b;--soft:#9aa4af;--rule:#343a41;--wash:#1e2329;
--link:#7db8f0;--bad:#ff8a80;--c0:#6aaeea;--c1:#f08090;--c2:#5fcf9f;--c3:#e0b050;--c4:#b79ae0;--c5:#4dd0e1;--c6:#bcaaa4;
--c7:#a4b4bd}}
"""
"""Colours by light and dark."""

DRAWN = """
svg text{fill:var(--ink);font:12px system-ui,sans-serif}
svg .name{font-weight:600;font-size:13px}svg .tick{fill:var(--soft);font-size:11.5px}
svg .grid{stroke:var(--rule);fill:none}svg .axis{stroke:var(--soft);fill:none}svg .line{fill:none;stroke-width:1.8}
svg .bar{stroke-width:1.4;fill:none}svg .printed{fill:var(--paper);stroke-width:1.6}svg .second{stroke-dasharray:5 4}
""" + "".join(
    f".s{i}{{stroke:var(--c{i})}}.k{i}{{fill:var(--c{i});background:var(--c{i})}}"
    f".k{i}.hollow{{fill:var(--paper);stroke:var(--c{i});background:var(--paper);border:2px solid var(--c{i})}}"
    for i in range(COLOURS)
)
"""Of a drawing, in the page or by itself."""

STYLE = (
    INK
    + """
*{box-sizing:border-box}html{scroll-padding-top:.8rem}
body{font:16px/1.5 system-ui,sans-serif;max-width:1240px;margin:1.5rem auto;padding:0 1rem;color:var(--ink);
background:var(--paper)}
h1{font-size:1.6rem;margin:0 0 .3rem}h2{font-size:1.2rem;margin:2.4rem 0 .3rem}h3{font-size:1rem;margin:1.2rem 0 .2rem}
p{max-width:48rem;margin:.4rem 0}a{color:var(--link)}.small,.about{color:var(--soft);font-size:.88rem}
nav{display:flex;flex-wrap:wrap;gap:.2rem .9rem;margin:.8rem 0;font-size:.92rem}
.scroll{overflow-x:auto;margin:.5rem 0}table{border-collapse:collapse;font-size:.92rem}
td,th{padding:.26rem .8rem .26rem 0;border-bottom:1px solid var(--rule);text-align:left;vertical-align:top}
th{white-space:nowrap;vertical-align:bottom}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
td.n{white-space:nowrap}th.n{white-space:normal}
td{white-space:nowrap}td.wide{white-space:normal;min-width:13rem;overflow-wrap:anywhere}tr.none td{color:var(--soft)}
th button{all:unset;cursor:pointer;font-weight:600;border-radius:3px}
th button::after{content:"\\2195";color:var(--soft);padding-left:.25rem;font-weight:400}
th[aria-sort=ascending] button::after{content:"\\2191";color:var(--ink)}
th[aria-sort=descending] button::after{content:"\\2193";color:var(--ink)}
button:focus-visible,a:focus-visible,summary:focus-visible,input:focus-visible,select:focus-visible{outline:2px solid
var(--link);outline-offset:2px}
.tools{display:flex;flex-wrap:wrap;align-items:center;gap:.4rem .8rem;font-size:.88rem;margin:.5rem 0 0}
input[type=search],select{font:inherit;padding:.22rem .5rem;border:1px solid var(--rule);border-radius:5px;
background:var(--paper);color:var(--ink);max-width:100%}
input[type=search]{width:15rem}select{width:30rem}
.panels{display:grid;gap:.8rem;grid-template-columns:repeat(auto-fill,minmax(min(330px,100%),1fr))}.panel{margin:0}
.key span{display:inline-block;margin-right:.9rem;font-size:.85rem;overflow-wrap:anywhere}
.key i{display:inline-block;width:.7rem;height:.7rem;border-radius:50%;margin-right:.3rem}
svg{width:100%;height:auto;display:block}
details{border-bottom:1px solid var(--rule)}details.run{content-visibility:auto;contain-intrinsic-size:auto 2.2rem}
summary{cursor:pointer;padding:.32rem 0;overflow-wrap:anywhere}details>div{padding:0 0 1rem 1.1rem}
details:target>summary,tr:target{background:var(--wash)}.state{color:var(--soft)}.failed,.bad{color:var(--bad)}
pre{background:var(--wash);padding:.6rem .8rem;border-radius:5px;overflow-x:auto;font-size:.85rem;margin:.4rem 0;
white-space:pre-wrap;overflow-wrap:anywhere}[hidden]{display:none!important}
"""
    + DRAWN
    + """
@media(max-width:560px){body{margin:.8rem auto;padding:0 .8rem}table{font-size:.85rem}td,th{padding-right:.55rem}
td{white-space:normal}td.wide{min-width:10rem}
select,input[type=search]{width:100%}}
@media print{.tools,nav,#curves{display:none}body{max-width:none;font-size:10pt;color:#000;background:#fff}
a{color:inherit}.scroll{overflow:visible}tr,figure{break-inside:avoid}th button::after{content:""}
td.wide{min-width:0}}
"""
)

SCRIPT = """
"use strict";
(function(){
const all=(q,at)=>Array.from((at||document).querySelectorAll(q));
// numbers by size, text by its letters, empty cells last whichever way the column is sorted
function sort(th){
  const table=th.closest("table"),body=table.tBodies[0],column=th.cellIndex;
  const down=th.getAttribute("aria-sort")==="ascending";
  all("th",table).forEach(x=>x.removeAttribute("aria-sort"));
  th.setAttribute("aria-sort",down?"descending":"ascending");
  const rows=Array.from(body.rows).map(row=>{
    const cell=row.cells[column],text=cell.textContent.trim();
    const number="v" in cell.dataset?Number(cell.dataset.v):null;
    return {row,number,text,empty:number===null&&(text===""||text==="-"||text.startsWith("not run"))};
  });
  rows.sort((a,b)=>{
    if(a.empty!==b.empty)return a.empty?1:-1;
    if((a.number===null)!==(b.number===null))return a.number===null?1:-1;
    const order=a.number!==null?a.number-b.number:a.text.localeCompare(b.text,"en",{numeric:true});
    return down?-order:order;
  });
  body.append(...rows.map(x=>x.row));
}
// every word must be in the row
function filter(tools){
  const words=tools.querySelector("input[type=search]").value.toLowerCase().split(/\\s+/).filter(Boolean);
  const ran=tools.querySelector("input[type=checkbox]"),only=ran&&ran.checked;
  const rows=all("#"+tools.dataset.of+" > *");
  let shown=0;
  for(const row of rows){
    const text=(row.dataset.text||row.textContent).toLowerCase();
    const keep=words.every(w=>text.includes(w))&&!(only&&row.classList.contains("none"));
    row.hidden=!keep;shown+=keep;
  }
  tools.querySelector("output").textContent=shown===rows.length?"":shown+" of "+rows.length+" shown";
}
all("th button").forEach(b=>b.addEventListener("click",()=>sort(b.closest("th"))));
all(".tools[data-of]").forEach(t=>t.addEventListener("input",()=>filter(t)));
// a link to a run opens its section, whatever the filter hides
function open(){
  const at=location.hash&&document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if(!at)return;
  if(at.tagName==="DETAILS"){at.hidden=false;at.open=true;}
  at.scrollIntoView();
}
addEventListener("hashchange",open);open();
// curves
const held=document.getElementById("curve-data"),chosen=document.getElementById("curve-run");
if(!held||!chosen)return;
const runs=JSON.parse(held.textContent),beside=document.getElementById("curve-beside");
const at=document.getElementById("curve-plots"),NS="http://www.w3.org/2000/svg";
function add(to,name,attributes,text){
  const x=document.createElementNS(NS,name);
  for(const k in attributes)x.setAttribute(k,attributes[k]);
  if(text!==undefined)x.textContent=text;
  to.append(x);return x;
}
const short=v=>v===0?"0":Math.abs(v)<1e-3?Number(v.toPrecision(3)).toExponential():String(Number(v.toPrecision(5)));
function ticks(low,high){
  const rough=(high-low)/5,unit=Math.pow(10,Math.floor(Math.log10(rough)));
  const step=[1,2,2.5,5,10].map(k=>k*unit).find(s=>s>=rough),found=[];
  for(let i=Math.ceil(low/step);i<=Math.floor(high/step+1e-9);i++)found.push(i*step);
  return found;
}
function plot(name,key,shown){
  const lines=shown.map(r=>(r[key]||[]).map((y,i)=>[r.epoch[i],y]).filter(p=>p[1]!==null));
  const points=lines.flat();
  if(!points.length)return null;
  const W=400,H=230,L=52,R=12,T=26,B=38;
  let low=Math.min(...points.map(p=>p[1])),high=Math.max(...points.map(p=>p[1]));
  const pad=(high-low||Math.abs(high)||1)*.06;low-=pad;high+=pad;
  const last=Math.max(...points.map(p=>p[0])),first=Math.min(...points.map(p=>p[0]));
  const x=e=>L+(W-L-R)*(last===first?.5:(e-first)/(last-first)),y=v=>H-B-(H-B-T)*(v-low)/(high-low);
  const figure=document.createElement("figure");figure.className="panel";
  const svg=add(figure,"svg",{viewBox:`0 0 ${W} ${H}`,role:"img","aria-label":name+" by epoch"});
  add(svg,"text",{class:"name",x:L,y:15},name);
  for(const v of ticks(low,high)){
    add(svg,"path",{class:"grid",d:`M${L} ${y(v).toFixed(1)}H${W-R}`});
    add(svg,"text",{class:"tick",x:L-6,y:y(v)+4,"text-anchor":"end"},short(v));
  }
  for(const e of ticks(first,last===first?last+1:last).filter(e=>Number.isInteger(e)&&e<=last))
    add(svg,"text",{class:"tick",x:x(e),y:H-B+16,"text-anchor":x(e)>W-R-8?"end":"middle"},e);
  add(svg,"path",{class:"axis",d:`M${L} ${T}V${H-B}H${W-R}`});
  add(svg,"text",{class:"tick",x:(L+W-R)/2,y:H-5,"text-anchor":"middle"},"epoch");
  lines.forEach((line,i)=>{
    if(!line.length)return;
    const d="M"+line.map(p=>x(p[0]).toFixed(1)+" "+y(p[1]).toFixed(1)).join("L");
    add(svg,"path",{class:`line s${i}${i?" second":""}`,d});
    if(line.length<=40)for(const p of line){
      const dot=add(svg,"circle",{class:`dot k${i}`,r:3,cx:x(p[0]),cy:y(p[1])});
      add(dot,"title",{},`epoch ${p[0]}: ${p[1]}`);
    }
    const end=line[line.length-1];
    add(svg,"text",{x:W-R,y:15+13*i,"text-anchor":"end"},`${short(end[1])} at epoch ${end[0]}`);
  });
  return figure;
}
function draw(){
  const shown=[chosen.value,beside.value].filter(v=>v!=="").map(v=>runs[Number(v)]);
  const made=[["loss","loss"],["kNN, top-1 in %","knn"],["learning rate","lr"],["spread of the features","spread"],
    ["spread of the embeddings","embedding_spread"]].map(p=>plot(p[0],p[1],shown)).filter(Boolean);
  at.replaceChildren(...made);
  if(!made.length)at.textContent="This run has not ended an epoch.";
  const key=document.getElementById("curve-key");key.replaceChildren();
  shown.forEach((r,i)=>{
    const a=document.createElement("a");a.href="#"+r.key;a.textContent=r.name;
    const mark=document.createElement("i");mark.className="k"+i;
    const span=document.createElement("span");span.append(mark,a);key.append(span);
  });
}
chosen.addEventListener("change",draw);beside.addEventListener("change",draw);
all("a[data-curve]").forEach(a=>a.addEventListener("click",()=>{chosen.value=a.dataset.curve;draw();}));
draw();
})();
"""

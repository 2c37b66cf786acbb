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
  const words=tools.querySelector("input[type=search]").value.toLowerCase().split(/\s+/).filter(Boolean);
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
// curves: a line for each run of the chosen settings, a colour for each of these settings
const held=document.getElementById("curve-data");
if(!held)return;
const runs=JSON.parse(held.textContent),choices=document.getElementById("curve-settings");
const at=document.getElementById("curve-plots"),NS="http://www.w3.org/2000/svg";
const boxes=all("input",choices);
const look=i=>`s${i%8} dash${Math.floor(i/8)%4}`;
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
  const lines=shown.map(s=>(s.run[key]||[]).map((y,i)=>[s.run.epoch[i],y]).filter(p=>p[1]!==null));
  const points=lines.flat();
  if(!points.length)return null;
  const W=400,H=230,L=52,R=12,T=26,B=38;
  let low=Infinity,high=-Infinity,first=Infinity,last=-Infinity;
  for(const [e,v] of points){
    low=Math.min(low,v);high=Math.max(high,v);first=Math.min(first,e);last=Math.max(last,e);
  }
  const pad=(high-low||Math.abs(high)||1)*.06;low-=pad;high+=pad;
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
    const {run,rank,about}=shown[i],end=line[line.length-1];
    const group=add(svg,"g",{class:"run-line","data-setting":run.setting});
    add(group,"title",{},`${about}, seed ${run.seed}: ${short(end[1])} at epoch ${end[0]}`);
    const d="M"+line.map(p=>x(p[0]).toFixed(1)+" "+y(p[1]).toFixed(1)).join("L");
    add(group,"path",{class:`line ${look(rank)}`,d});
    if(line.length===1||(line.length<=40&&lines.length<=4))for(const p of line){
      const dot=add(group,"circle",{class:`dot k${rank%8}`,r:3,cx:x(p[0]),cy:y(p[1])});
      add(dot,"title",{},`epoch ${p[0]}: ${p[1]}`);
    }
  });
  return figure;
}
function draw(){
  const chosen=boxes.filter(b=>b.checked).map(b=>Number(b.value)),rank=new Map(chosen.map((s,i)=>[s,i]));
  const about=s=>boxes[s].closest("label").textContent.trim();
  boxes.forEach((b,s)=>{
    b.closest("label").querySelector("path").setAttribute("class",rank.has(s)?`line ${look(rank.get(s))}`:"line");
  });
  const shown=runs.filter(r=>rank.has(r.setting))
    .map(r=>({run:r,rank:rank.get(r.setting),about:about(r.setting)}));
  at.classList.toggle("many",shown.length>8);
  const made=[["loss","loss"],["kNN, top-1 in %","knn"],["learning rate","lr"],["spread of the features","spread"],
    ["spread of the embeddings","embedding_spread"],["angle of the positives in degrees","lens_angle"],
    ["share of the pull from the positive","lens_pull"],["effective rank of the features","lens_rank"]].map(p=>plot(p[0],p[1],shown)).filter(Boolean);
  at.replaceChildren(...made);
  if(!made.length)at.textContent="Choose a setting above.";
}
function raise(setting){
  at.classList.toggle("raised",setting!==null);
  all(".run-line",at).forEach(g=>g.classList.toggle("on",g.dataset.setting===setting));
}
choices.addEventListener("change",draw);
boxes.forEach(b=>{
  const label=b.closest("label");
  label.addEventListener("mouseenter",()=>raise(b.value));
  label.addEventListener("mouseleave",()=>raise(null));
});
// the buttons act on the settings that the filter shows
all("button[data-check]").forEach(button=>button.addEventListener("click",()=>{
  boxes.forEach(b=>{if(!b.closest("label").hidden)b.checked=!!button.dataset.check;});
  draw();
}));
all("a[data-curve]").forEach(a=>a.addEventListener("click",()=>{
  const run=runs.find(r=>r.key===a.dataset.curve);
  boxes.forEach((b,s)=>{b.checked=s===run.setting;});
  draw();
}));
draw();
})();

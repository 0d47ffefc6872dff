"""The page that `html` fills: its frame, its own style, and the script that makes the picture answer."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title><!--TITLE--></title>
<style>
<!--STYLE-->
* { box-sizing: border-box; }
html, body { height: 100%; margin: 0; background: var(--paper); color: var(--ink); overflow: hidden;
  font: 14px/1.45 Inter, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif; }
.picture { display: block; width: 100%; height: 100%; cursor: grab; touch-action: none; user-select: none; }
.picture.moving { cursor: grabbing; }
.picture .paper { fill: none; }
.picture .card { cursor: pointer; outline: none; }
.picture .card, .picture .wire, .picture .tag * { transition: opacity .15s, stroke-opacity .15s; }
.picture.focus .card:not(.hot), .picture.focus .wire:not(.hot), .picture.focus .tag:not(.hot) text { opacity: .14; }
.picture.focus .tag:not(.hot) .pill { stroke-opacity: .14; }
.picture .hot .edge, .picture .hot .version { stroke-width: 2.6; }
.picture .card:focus-visible .shape, .picture .picked .shape { stroke-width: 3.4; }
.tools { position: fixed; top: 14px; right: 14px; display: flex; gap: 6px; z-index: 2; }
button { font: inherit; color: var(--ink); background: var(--panel); border: 1px solid var(--line);
  border-radius: 8px; min-width: 34px; height: 34px; cursor: pointer; }
button:hover { border-color: var(--muted); }
.panel { position: fixed; top: 62px; right: 14px; width: 330px; max-width: calc(100vw - 28px); z-index: 2;
  max-height: calc(100vh - 80px); overflow: auto; padding: 18px 20px 20px; background: var(--panel);
  border: 1px solid var(--line); border-radius: 12px; box-shadow: 0 8px 30px rgb(0 0 0 / .14); }
.panel[hidden] { display: none; }
.panel h2 { margin: 0 34px 2px 0; font-size: 17px; overflow-wrap: anywhere; }
.panel p { margin: 0 0 14px; color: var(--muted); }
.panel dl { margin: 0; display: grid; grid-template-columns: max-content 1fr; gap: 9px 16px; }
.panel dt { color: var(--muted); }
.panel dd { margin: 0; overflow-wrap: anywhere; font: 12.5px/1.55 ui-monospace, 'SF Mono', Menlo, Consolas,
  'DejaVu Sans Mono', monospace; }
.panel dd div + div { margin-top: 2px; }
#close { position: absolute; top: 12px; right: 12px; border: none; background: none; font-size: 20px; }
@media (min-width: 900px) { .open .picture { width: calc(100% - 352px); } }
@media print { .tools, .panel { display: none; } }
</style>
</head>
<body>
<!--PICTURE-->
<div class="tools">
<button id="out" title="Zoom out (-)" aria-label="Zoom out">−</button>
<button id="in" title="Zoom in (+)" aria-label="Zoom in">+</button>
<button id="fit" title="Show everything (0)">Fit</button>
<button id="theme" title="Light or dark">Theme</button>
</div>
<aside class="panel" id="panel" hidden>
<button id="close" aria-label="Close">×</button>
<h2 id="name"></h2><p id="about"></p><dl id="rows"></dl>
</aside>
<script type="application/json" id="details"><!--DETAILS--></script>
<script>
'use strict';
const byId = id => document.getElementById(id);
const picture = document.querySelector('.picture');
const details = JSON.parse(byId('details').textContent);
const cards = [...picture.querySelectorAll('.card')];
const wires = [...picture.querySelectorAll('.wire, .tag')];
const whole = picture.getAttribute('viewBox').split(' ').map(Number);
let view = whole.slice();

// ---- what belongs together
const targets = wire => wire.dataset.target.split(' ');
function light(chosen, ids) {
  const near = new Set(ids);
  for (const wire of chosen) { near.add(wire.dataset.source); for (const id of targets(wire)) near.add(id); }
  for (const wire of wires) wire.classList.toggle('hot', chosen.includes(wire));
  for (const card of cards) card.classList.toggle('hot', near.has(card.dataset.call));
  picture.classList.add('focus');
}
const touches = (wire, id) => wire.dataset.source === id || targets(wire).includes(id);
function lightCall(id) {
  const chosen = wires.filter(wire => touches(wire, id));
  const near = [id];
  for (const wire of chosen) {
    if (wire.dataset.source === id) near.push(...targets(wire)); else near.push(wire.dataset.source);
  }
  light([], near);
  for (const wire of chosen) wire.classList.add('hot');
}
function lightTag(tag) { light(wires.filter(wire => wire.dataset.line === tag.dataset.line), []); }
function dark() {
  if (picked) { lightCall(picked); return; }
  picture.classList.remove('focus');
  for (const part of [...cards, ...wires]) part.classList.remove('hot');
}
for (const card of cards) {
  card.addEventListener('pointerenter', () => lightCall(card.dataset.call));
  card.addEventListener('pointerleave', dark);
  card.addEventListener('focus', () => { if (card.matches(':focus-visible')) lightCall(card.dataset.call); });
  card.addEventListener('blur', dark);
  card.addEventListener('keydown', event => {
    if (event.key === 'Enter' || event.key === ' ') { event.preventDefault(); pick(card.dataset.call); }
  });
}
for (const wire of wires) {
  wire.addEventListener('pointerenter', () => lightTag(wire));
  wire.addEventListener('pointerleave', dark);
}

// ---- details of a call
let picked = null;
function pick(id) {
  picked = id;
  for (const card of cards) card.classList.toggle('picked', card.dataset.call === id);
  byId('panel').hidden = id === null;
  document.body.classList.toggle('open', id !== null);
  if (id === null) { dark(); return; }
  const shown = details[id];
  byId('name').textContent = shown.name;
  byId('about').textContent = shown.about;
  const rows = byId('rows');
  rows.replaceChildren();
  for (const [term, values] of shown.rows) {
    const dt = document.createElement('dt'), dd = document.createElement('dd');
    dt.textContent = term;
    for (const value of values) {
      const line = document.createElement('div');
      line.textContent = value;
      dd.append(line);
    }
    rows.append(dt, dd);
  }
  lightCall(id);
}

// ---- pan and zoom
function show() { picture.setAttribute('viewBox', view.join(' ')); }
function scale() { const matrix = picture.getScreenCTM(); return matrix ? 1 / matrix.a : 1; }
function at(event) {
  const matrix = picture.getScreenCTM();
  const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse());
  return [point.x, point.y];
}
function zoom(factor, [x, y]) {
  const width = Math.min(Math.max(view[2] * factor, whole[2] / 20), whole[2] * 4);
  const real = width / view[2];
  view = [x - (x - view[0]) * real, y - (y - view[1]) * real, width, view[3] * real];
  show();
}
const middle = () => [view[0] + view[2] / 2, view[1] + view[3] / 2];
function fit() { view = whole.slice(); show(); }
picture.addEventListener('wheel', event => {
  event.preventDefault();
  zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.004), at(event));
}, { passive: false });

const fingers = new Map();
let travelled = 0, pressed = null;
const spread = () => { const [a, b] = [...fingers.values()]; return Math.hypot(a.x - b.x, a.y - b.y); };
picture.addEventListener('pointerdown', event => {
  if (fingers.size === 0) { travelled = 0; pressed = event.target.closest('.card'); }
  fingers.set(event.pointerId, { x: event.clientX, y: event.clientY });
});
window.addEventListener('pointermove', event => {
  const last = fingers.get(event.pointerId);
  if (!last) return;
  const before = fingers.size === 2 ? spread() : 0;
  const dx = event.clientX - last.x, dy = event.clientY - last.y;
  fingers.set(event.pointerId, { x: event.clientX, y: event.clientY });
  travelled += Math.abs(dx) + Math.abs(dy);
  if (travelled < 4) return;
  picture.classList.add('moving');
  if (fingers.size === 2) { zoom(before / Math.max(spread(), 1), at(event)); return; }
  view = [view[0] - dx * scale(), view[1] - dy * scale(), view[2], view[3]];
  show();
});
function release(event) {
  if (!fingers.delete(event.pointerId) || fingers.size) return;
  picture.classList.remove('moving');
  if (travelled < 4 && event.type === 'pointerup') pick(pressed ? pressed.dataset.call : null);
}
window.addEventListener('pointerup', release);
window.addEventListener('pointercancel', release);

byId('in').onclick = () => zoom(0.8, middle());
byId('out').onclick = () => zoom(1.25, middle());
byId('fit').onclick = fit;
byId('close').onclick = () => pick(null);
byId('theme').onclick = () => {
  const root = document.documentElement;
  const now = root.dataset.theme || (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
  root.dataset.theme = now === 'dark' ? 'light' : 'dark';
};
window.addEventListener('keydown', event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === 'Escape') pick(null);
  else if (event.key === '+' || event.key === '=') zoom(0.8, middle());
  else if (event.key === '-') zoom(1.25, middle());
  else if (event.key === '0') fit();
});
</script>
</body>
</html>
"""

// ---- where the time went: shares of each worker, the last steps, calls and where they run
let timedRun = 0;
const PLAIN = { wait: 'wait', transfer: 'rows', load: 'alone', read: 'alone', save: 'alone' };
const LABELS = { waiting: 'ground', 'rows of samples': 'rows' };
function times() {
  const having = data.runs.map((_, i) => i).filter(i => data.times[i] && (data.times[i].use || Object.keys(data.times[i].median).length || data.plans[i]));
  byId('time').hidden = !having.length;
  if (!having.length) return;
  if (!having.includes(timedRun)) timedRun = having[0];
  const select = byId('time-run');
  select.replaceChildren();
  for (const i of having) option(select, i, data.runs[i].name);
  select.value = timedRun;
  byId('timed').hidden = having.length < 2;
  select.onchange = () => { timedRun = +select.value; times(); };
  const own = data.times[timedRun], plan = data.plans[timedRun] || { calls: {}, roles: [], picture: null, reason: '' };
  shares(own, plan);
  lastSteps(own.last, plan);
  calls(own, plan);
}
function roleOf(call, plan, own) {
  return under(plan.calls, call)?.role || own.last?.works.find(work => work[0] === call && work[1] === 'call')?.[2] || call;
}
function cssOf(call, plan, own) {
  const roles = plan.roles.length ? plan.roles : [...new Set((own.last?.works || []).filter(work => work[1] === 'call').map(work => work[2]))];
  const role = Math.max(0, roles.indexOf(roleOf(call, plan, own)));
  const kind = under(plan.calls, call)?.css || (/train/.test(call) ? 'train' : /gen/.test(call) ? 'gen' : 'inf');
  return `r${role % 8 + (role >= 8 && plan.roles.length > 8 ? 8 : 0)} ${kind}`;
}
const keyCss = (key, i, own, plan) => own.use.is_call[i] ? cssOf(key, plan, own) : under(LABELS, key) || (key === 'parameters' ? 'r0 hook' : 'alone');
function shares(own, plan) {
  const box = byId('use'), { use } = own;
  box.replaceChildren();
  const note = byId('use-note');
  if (!use) { note.textContent = 'There is no trace.json with calls in this folder.'; return; }
  const steps = use.steps.length ? `, steps ${number(use.steps[0])} to ${number(use.steps[1])}` : '';
  note.textContent = `Of ${span(use.seconds)} of each worker${steps}${own.whole ? '' : ', the end of a long trace'}${data.runs[timedRun].attempts.length ? ', since the run last began again' : ''}. Calls count with what they wait for inside.`;
  const keys = add('div', box, '', 'keys');
  use.keys.forEach((key, i) => {
    const total = use.workers.reduce((sum, [, own]) => sum + own[i], 0) / use.workers.length / use.seconds;
    const item = add('span', keys);
    swatch(keyCss(key, i, own, plan), item);
    item.append(`${key} ${(100 * total).toFixed(total < 0.1 ? 1 : 0)}%`);
  });
  const rowHeight = use.workers.length > 24 ? 12 : 22, shown = use.workers.slice(0, 256), left = 96;
  const width = Math.max(300, box.clientWidth || 900), height = shown.length * rowHeight;
  const svg = make('svg', { class: 'plot', viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': 'shares of the time of each worker' }, box);
  shown.forEach(([name, spent], row) => {
    if (rowHeight > 12 || row % 2 === 0) make('text', { x: left - 10, y: row * rowHeight + rowHeight / 2 + 4, 'text-anchor': 'end', class: 'muted' }, svg, name);
    let at = left;
    use.keys.forEach((key, i) => {
      const length = spent[i] / use.seconds * (width - left);
      if (length <= 0) return;
      const bar = make('rect', { class: keyCss(key, i, own, plan), x: at, width: length, y: row * rowHeight + 2, height: rowHeight - 4 }, svg);
      bar.addEventListener('pointermove', event => tell(`${key}\n${name}: ${span(spent[i])}, ${(100 * spent[i] / use.seconds).toFixed(1)}%`, event));
      bar.addEventListener('pointerleave', event => tell('', event));
      at += length;
    });
  });
}
function swatch(css, parent) {
  make('rect', { class: css, width: 12, height: 12, rx: 3 }, make('svg', { class: 'plot key', width: 12, height: 12, viewBox: '0 0 12 12' }, parent));
}
let view = null;
function lastSteps(last, plan) {
  const box = byId('last');
  box.replaceChildren();
  byId('last-title').hidden = byId('last-hint').hidden = !last;
  if (!last) return;
  const own = data.times[timedRun], ticksIn = 100000, left = 96, row = 26, top = 4;
  byId('last-title').textContent = last.steps[0] === last.steps[1] ? `Step ${number(last.steps[0])}` : `Steps ${number(last.steps[0])} to ${number(last.steps[1])}`;
  const tools = add('div', box, '', 'tools');
  const width = Math.max(320, box.clientWidth || 900), height = last.tracks.length * row + top + 24;
  const svg = make('svg', { class: 'plot', viewBox: `0 0 ${width} ${height}`, tabindex: 0, role: 'group', 'aria-label': 'timeline' }, box);
  make('rect', { x: left, y: 0, width: width - left, height }, make('clipPath', { id: 'window' }, svg));
  const marks = make('g', {}, svg), bars = make('g', {}, make('g', { 'clip-path': 'url(#window)' }, svg)), names = make('g', { 'pointer-events': 'none' }, svg);
  const inside = [...new Set(last.works.filter(work => work[1] === 'phase').map(work => work[0]))];
  const shape = { call: [1, 3, 20], phase: [1, 18, 5], master: [1, 9, 8], reward: [1, 9, 8], realloc: [1, 8, 10], offload: [1, 8, 10], travel: [1, 6, 14], transfer: [1, 9, 8], wait: [1, 12, 2.5] };
  const label = work => work[1] === 'wait' ? 'waiting' : work[1] === 'call' ? `${work[0]}: ${work[2]}` : work[0];
  const css = work => work[1] === 'call' ? cssOf(work[0], plan, own) : work[1] === 'realloc' || work[1] === 'offload' || work[1] === 'travel' ? 'r0 hook' : work[1] === 'phase' ? `inside${inside.indexOf(work[0]) % 6}` : under(PLAIN, work[1]) || 'rows';
  last.tracks.forEach(([name, flat], number) => {
    const text = make('text', { x: left - 10, y: top + number * row + 16, 'text-anchor': 'end', class: 'muted' }, svg, name.replace(/^worker \d+, /, ''));
    make('title', {}, text, name);
    const order = [];
    for (let i = 0; i < flat.length; i += 3) order.push(flat.slice(i, i + 3));
    for (const [work, begin, end] of order) {
      const kind = last.works[work], [, y, size] = under(shape, kind[1]) || [1, 15, 6];
      const bar = make('rect', { class: css(kind), x: begin, width: Math.max(end - begin, 1), y: top + number * row + y, height: size }, bars);
      const words = `${label(kind)}\n${name}\n${seconds(begin / ticksIn * last.seconds)} to ${seconds(end / ticksIn * last.seconds)}, ${seconds((end - begin) / ticksIn * last.seconds)}`;
      bar.addEventListener('pointermove', event => { if (!grip) tell(words, event); });
      bar.addEventListener('pointerleave', event => tell('', event));
      if (kind[1] === 'call') make('text', { 'data-a': begin, 'data-b': end, y: top + number * row + 17, 'text-anchor': 'middle', class: `on-${css(kind)}` }, names, kind[0]);
    }
  });
  view = [0, ticksIn];
  let grip = null;
  const look = (begin, size) => {
    size = Math.min(Math.max(size, ticksIn / 2000), ticksIn);
    begin = Math.min(Math.max(begin, 0), ticksIn - size);
    view = [begin, begin + size];
    const scale = (width - left) / size;
    bars.setAttribute('transform', `translate(${left - begin * scale} 0) scale(${scale} 1)`);
    for (const text of names.childNodes) {
      const a = Math.max(left, left + (text.dataset.a - begin) * scale), b = Math.min(width, left + (text.dataset.b - begin) * scale);
      text.size ??= text.getComputedTextLength();
      text.setAttribute('x', (a + b) / 2);
      text.setAttribute('visibility', b - a > text.size + 8 ? 'visible' : 'hidden');
    }
    marks.replaceChildren();
    const low = begin / ticksIn * last.seconds, high = (begin + size) / ticksIn * last.seconds;
    for (const s of ticks(low, high, Math.max(3, Math.floor(width / 130)))) {
      const x = left + (s - low) / (high - low) * (width - left);
      make('line', { class: 'grid', x1: x, x2: x, y1: 0, y2: height - 20 }, marks);
      if (x < width - 24) make('text', { class: 'muted', x, y: height - 6, 'text-anchor': 'middle' }, marks, seconds(s));
    }
  };
  const middle = () => (view[0] + view[1]) / 2, zoom = (factor, at = middle()) => { const size = Math.min((view[1] - view[0]) * factor, ticksIn); look(at - (at - view[0]) * size / (view[1] - view[0]), size); };
  const tickAt = event => { const rect = svg.getBoundingClientRect(); return view[0] + ((event.clientX - rect.left) * width / rect.width - left) / (width - left) * (view[1] - view[0]); };
  for (const [text, title, act] of [['−', 'Zoom out', () => zoom(1.6)], ['+', 'Zoom in', () => zoom(0.6)], ['All', 'Show everything', () => look(0, ticksIn)]]) {
    const button = add('button', tools, text);
    button.title = title;
    button.onclick = act;
  }
  svg.addEventListener('wheel', event => {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) look(view[0] + event.deltaX / 1000 * (view[1] - view[0]), view[1] - view[0]);
    else zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.004), tickAt(event));
  }, { passive: false });
  svg.addEventListener('pointerdown', event => { if (event.pointerType === 'mouse') { grip = tickAt(event); svg.setPointerCapture(event.pointerId); tell('', event); } });
  svg.addEventListener('pointermove', event => { if (grip !== null) look(view[0] + grip - tickAt(event), view[1] - view[0]); });
  for (const end of ['pointerup', 'pointercancel']) svg.addEventListener(end, () => { grip = null; });
  svg.addEventListener('keydown', event => {
    const size = view[1] - view[0];
    const act = { ArrowLeft: () => look(view[0] - size / 8, size), ArrowRight: () => look(view[0] + size / 8, size), '+': () => zoom(0.7), '=': () => zoom(0.7), '-': () => zoom(1.4), 0: () => look(0, ticksIn) }[event.key];
    if (!act || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    act();
  });
  look(0, ticksIn);
  if (last.left_out) add('p', box, `${number(last.left_out)} more tracks are left out.`, 'muted');
}
function calls(own, plan) {
  byId('plan-note').textContent = plan.reason;
  for (const one of document.querySelectorAll('.graph')) one.hidden = one.id !== `graph${plan.picture}`;
  const table = byId('calls');
  table.replaceChildren();
  const known = Object.keys(plan.calls).length ? Object.keys(plan.calls) : (own.use?.keys || []).filter((_, i) => own.use.is_call[i]);
  const all = own.median.step || Object.entries(own.median).filter(([name]) => known.includes(name)).reduce((sum, [, s]) => sum + s, 0);
  const phases = own.use?.phases || {}, hasPhases = Object.keys(phases).length > 0;
  const heads = [['call'], ['kind'], ['place'], ['devices'], ['seconds of a step', 'number'], ['of a step', 'number']];
  row(add('thead', table), hasPhases ? [...heads, ['inside', 'wrap']] : heads, 'th');
  const body = add('tbody', table);
  for (const name of known) {
    const call = under(plan.calls, name), s = under(own.median, name);
    const inside = Object.entries(under(phases, name) || {}), sum = inside.reduce((total, [, t]) => total + t, 0);
    const words = inside.sort((a, b) => b[1] - a[1]).slice(0, 6).map(([phase, t]) => `${phase} ${(100 * t / sum).toFixed(0)}%`).join(', ');
    const line = row(body, [[''], [call ? `${call.kind} of ${call.role}` : `of ${roleOf(name, plan, own)}`], [call?.place || '–'], [call?.devices || '–'],
      [s === undefined ? '–' : seconds(s), 'number'], [s === undefined || !all ? '–' : `${(100 * s / all).toFixed(1)}%`, 'number'], ...(hasPhases ? [[words, 'wrap']] : [])]);
    swatch(cssOf(name, plan, own), line.cells[0]);
    line.cells[0].append(' ' + name);
  }
  for (const [name, s] of Object.entries(own.median)) {
    if (name === 'step' || known.includes(name)) continue;
    row(body, [[name === 'realloc_wait' ? 'waiting for parameters' : name], ['–'], ['–'], ['–'], [seconds(s), 'number'], [all ? `${(100 * s / all).toFixed(1)}%` : '–', 'number'], ...(hasPhases ? [['']] : [])]);
  }
}

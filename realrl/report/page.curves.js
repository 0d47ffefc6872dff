let data = JSON.parse(byId('data').textContent);
const state = { scale: 'step', log: false, smooth: 0, average: true, hidden: new Set(), range: null, at: null, find: '', sort: [Infinity, 1] };

// ---- elements and texts
function add(tag, parent, text, className) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined && text !== '') element.textContent = text;
  parent.append(element);
  return element;
}
// what an object has under a name that a run chose, such as 'constructor'
const under = (object, name) => Object.hasOwn(object, name) ? object[name] : undefined;
function option(select, value, text) { select.add(new Option(text, value)); }
// characters that would not be seen, or would move others about, get a sign of their own
const plainly = text => text.replace(/[\u0000-\u0008\u000b-\u001f]/g, c => String.fromCharCode(0x2400 + c.charCodeAt(0)))
  .replace(/[\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, '\u00b7');
function number(value) {
  if (value === null || value === undefined) return '–';
  if (typeof value !== 'number') return String(value);
  const size = Math.abs(value);
  if (value === 0) return '0';
  if (size >= 1e9) return (value / 1e9).toPrecision(3) + 'G';
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + 'M';
  if (size >= 1e4) return Math.round(value).toLocaleString('en');
  if (size >= 1000) return (+value.toPrecision(5)).toLocaleString('en');
  if (size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, 'e');
  return String(+value.toPrecision(4));
}
function span(s) {
  if (s === null || s === undefined) return '–';
  if (s < 60) return seconds(s);
  const minutes = Math.round(s / 60);
  if (s < 600) return +(s / 60).toFixed(1) + ' min';
  if (minutes < 120) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h` + (minutes % 60 ? ` ${minutes % 60} min` : '');
}
const gigabytes = gb => gb === null ? '–' : gb >= 1 ? gb.toFixed(gb < 10 ? 2 : 1) + ' GB' : (gb * 1000).toFixed(0) + ' MB';

// ---- series: a run's curve, or the mean of runs with several seeds
const stepOf = bucket => data.grid[0] + (bucket + 1) * data.grid[1] - 1;
function place(run, bucket, at) {
  if (state.scale === 'step') return stepOf(bucket);
  const scale = data.runs[run].at[state.scale];
  return scale.length ? scale[bucket - at] : undefined;
}
// points [x, mean, low, high, bucket] of one run
function pointsOf(metric, run) {
  const curve = under(data.metrics, metric)?.[run];
  if (!curve) return [];
  const points = [], at = (values, i) => (Array.isArray(values) ? values[i] : values);
  for (let i = 0; i < curve.n; i++) {
    const mean = at(curve.mean, i);
    if (mean === null || mean === undefined) continue;
    const x = place(run, curve.at + i, curve.at);
    if (x === undefined) continue;
    const low = 'low' in curve ? at(curve.low, i) : mean, high = 'high' in curve ? at(curve.high, i) : mean;
    points.push([x, mean, low, high, curve.at + i]);
  }
  return points;
}
function meanOf(metric, runs) {
  const buckets = new Map();
  for (const run of runs) for (const point of pointsOf(metric, run)) {
    if (!buckets.has(point[4])) buckets.set(point[4], []);
    buckets.get(point[4]).push(point);
  }
  const mean = values => values.reduce((sum, one) => sum + one, 0) / values.length;
  return [...buckets].sort((a, b) => a[0] - b[0]).map(([bucket, points]) => {
    const means = points.map(point => point[1]);
    return [mean(points.map(point => point[0])), mean(means), Math.min(...means), Math.max(...means), bucket];
  });
}
const averages = () => state.average && data.groups.some(group => group.runs.length > 1);
function lines() {
  if (averages()) {
    return data.groups.map((group, i) => ({ key: 'g' + i, colour: i, runs: group.runs,
      name: group.runs.length > 1 && data.groups.length > 1 ? `${group.name} (${group.runs.length} seeds)` : group.name }));
  }
  return data.runs.map((run, i) => {
    const group = data.groups.find(one => one.runs.includes(i));
    const own = data.groups.length > 1 && group.name !== run.name ? `${group.name} · ` : '';
    return { key: 'r' + i, colour: i, runs: [i], name: own + run.name };
  });
}
const classes = colour => `c${colour % 12}` + (colour >= 12 ? ` dash${1 + Math.floor(colour / 12) % 2}` : '');
function seriesOf(metric) {
  return lines().filter(line => !state.hidden.has(line.key)).map(line => ({ ...line,
    points: line.runs.length > 1 ? meanOf(metric, line.runs) : pointsOf(metric, line.runs[0]) })).filter(one => one.points.length);
}
function smoothed(points) {
  if (!state.smooth || points.length < 3) return points;
  let sum = 0, weight = 0;
  return points.map(point => {
    sum = state.smooth * sum + (1 - state.smooth) * point[1];
    weight = state.smooth * weight + 1 - state.smooth;
    return [point[0], sum / weight, point[2], point[3], point[4]];
  });
}

// ---- a chart
const charts = [];
const M = { left: 50, right: 10, top: 8, bottom: 20, height: 190 };
const TIMES = [60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400];
function ticks(low, high, most, isTime) {
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = (isTime && (high - low) / most > 20 && TIMES.find(one => (high - low) / one <= most))
    || [1, 2, 5, 10].map(factor => factor * power).find(one => (high - low) / one <= most);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step && found.length < 20; i++) found.push(+(i * step).toPrecision(12));
  return found;
}
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)) && found.length < 60; power++) {
    for (const factor of high / low > 50 ? [1] : [1, 2, 5]) {
      const value = factor * 10 ** power;
      if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
    }
  }
  const every = Math.ceil(found.length / 6);
  return found.filter((_, i) => i % every === 0);
}
const axisText = x => state.scale === 'seconds' ? span(x) : number(x);
function addChart(metric, parent) {
  const figure = add('figure', parent), caption = add('figcaption', figure);
  add('span', caption, metric);
  const chart = { metric, figure, now: add('span', caption, '', 'now') };
  chart.svg = make('svg', { role: 'img', tabindex: 0, 'aria-label': `${metric} over ${state.scale}` }, figure);
  watchPointer(chart);
  charts.push(chart);
  return chart;
}
function draw(chart) {
  const { svg } = chart, width = Math.max(200, svg.clientWidth || 400);
  svg.replaceChildren();
  svg.setAttribute('viewBox', `0 0 ${width} ${M.height}`);
  const all = seriesOf(chart.metric);
  const inside = point => !state.range || (point[4] >= state.range[0] && point[4] <= state.range[1]);
  chart.series = all.map(one => ({ ...one, raw: one.points.filter(inside), points: smoothed(one.points).filter(inside) })).filter(one => one.points.length);
  const last = chart.series.map(one => one.points[one.points.length - 1][1]);
  chart.now.textContent = last.length === 1 ? number(last[0]) : '';
  if (!chart.series.length) {
    make('text', { class: 'label', x: width / 2, y: M.height / 2, 'text-anchor': 'middle' }, svg, 'no values');
    return;
  }
  const points = chart.series.flatMap(one => one.points);
  const banded = chart.series.length <= 6;
  let low = Math.min(...points.map(p => banded ? p[2] : p[1])), high = Math.max(...points.map(p => banded ? p[3] : p[1]));
  const log = state.log && high > 0;
  if (log) low = Math.min(...points.flatMap(p => [p[1], banded ? p[2] : p[1]]).filter(v => v > 0));
  if (!Number.isFinite(low)) low = high / 10;
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) { const pad = Math.abs(low) * 0.1 || 1; low = log ? low / 1.5 : low - pad; high = log ? high * 1.5 : high + pad; }
  let x0 = Math.min(...points.map(p => p[0])), x1 = Math.max(...points.map(p => p[0]));
  if (x1 <= x0) { x0 -= 0.5; x1 += 0.5; }
  const value = log ? Math.log : one => one;
  const pad = (value(high) - value(low)) * 0.05;
  const x = v => M.left + (v - x0) / (x1 - x0) * (width - M.left - M.right);
  const y = v => log && v <= 0 ? M.height - M.bottom
    : M.height - M.bottom - (value(v) - value(low) + pad) / (value(high) - value(low) + 2 * pad) * (M.height - M.top - M.bottom);
  Object.assign(chart, { x, y, x0, x1, width });
  for (const v of log ? logTicks(low, high) : ticks(low, high, 5)) {
    make('line', { class: 'tick', x1: M.left, x2: width - M.right, y1: y(v), y2: y(v) }, svg);
    make('text', { class: 'label', x: M.left - 6, y: y(v) + 3.5, 'text-anchor': 'end' }, svg, number(v));
  }
  let end = -100;
  for (const v of ticks(x0, x1, Math.max(2, Math.floor(width / 65)), state.scale === 'seconds').filter(v => state.scale !== 'step' || Number.isInteger(v))) {
    const text = axisText(v), half = text.length * 3, at = Math.min(Math.max(x(v), M.left), width - half);
    if (at - half < end + 8) continue;
    make('text', { class: 'label', x: at, y: M.height - 5, 'text-anchor': 'middle' }, svg, text);
    end = at + half;
  }
  drawSeries(chart, banded, x, y);
  chart.cross = make('g', { 'pointer-events': 'none' }, svg);
  cross(chart);
}
function drawSeries(chart, banded, x, y) {
  const clip = `clip${charts.indexOf(chart)}`;
  make('rect', { x: M.left - 2, y: M.top - 4, width: chart.width - M.left - M.right + 4, height: M.height - M.top - M.bottom + 6 },
    make('clipPath', { id: clip }, chart.svg));
  const area = make('g', { 'clip-path': `url(#${clip})` }, chart.svg);
  const path = points => points.map((p, i) => `${i ? 'L' : 'M'}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join('');
  for (const one of chart.series) {
    const group = make('g', { class: classes(one.colour) }, area);
    if (banded && one.raw.some(p => p[3] > p[2])) {
      const top = one.raw.map(p => `${x(p[0]).toFixed(1)} ${y(p[3]).toFixed(1)}`);
      const bottom = one.raw.map(p => `${x(p[0]).toFixed(1)} ${y(p[2]).toFixed(1)}`).reverse();
      make('path', { class: 'band', d: `M${[...top, ...bottom].join('L')}Z` }, group);
    }
    const dash = one.colour >= 12 ? ` dash${1 + Math.floor(one.colour / 12) % 2}` : '';
    if (state.smooth && !averages()) make('path', { class: 'curve raw', d: path(one.raw) }, group);
    make('path', { class: 'curve' + dash, d: path(one.points) }, group);
    if (one.points.length <= 24 && chart.series.length <= 12) for (const p of one.points) make('circle', { class: 'point', cx: x(p[0]), cy: y(p[1]), r: 2.6 }, group);
    if (state.scale !== 'step' || lines().length > 4) continue;
    for (const run of one.runs) for (const step of data.runs[run].attempts) {
      if (step < chart.x0 || step > chart.x1) continue;
      const mark = make('line', { class: 'restart', x1: x(step), x2: x(step), y1: M.top, y2: M.height - M.bottom }, group);
      make('title', {}, mark, `began again with step ${step}`);
    }
  }
}

// ---- what is under the pointer: the same bucket in all charts
function cross(chart) {
  if (!chart.cross || !isShown(chart)) return;
  chart.cross.replaceChildren();
  if (state.at === null || !chart.series?.length) return;
  for (const one of chart.series) {
    const point = nearest(one.points, state.at);
    if (!point) continue;
    if (!chart.cross.childNodes.length) make('line', { class: 'cross', x1: chart.x(point[0]), x2: chart.x(point[0]), y1: M.top, y2: M.height - M.bottom }, chart.cross);
    make('circle', { class: `point ${classes(one.colour)}`, cx: chart.x(point[0]), cy: chart.y(point[1]), r: 3.4 }, chart.cross);
  }
}
function nearest(points, bucket) {
  let best = null;
  for (const point of points) if (!best || Math.abs(point[4] - bucket) < Math.abs(best[4] - bucket)) best = point;
  return best && Math.abs(best[4] - bucket) <= Math.max(3, data.grid[2] / 40) ? best : null;
}
function tipOf(chart) {
  const box = document.createElement('div'), width = data.grid[1], last = stepOf(state.at);
  add('div', box, width > 1 ? `steps ${number(last - width + 1)} to ${number(last)}` : `step ${number(last)}`, 'tiphead');
  const found = chart.series.map(one => [one, nearest(one.points, state.at)]).filter(([, point]) => point);
  found.sort((a, b) => b[1][1] - a[1][1]);
  for (const [one, point] of found.slice(0, 14)) {
    const row = add('div', box, '', 'tiprow');
    add('span', row, '', `line ${classes(one.colour)}`);
    add('span', row, chart.series.length > 1 ? one.name : chart.metric);
    add('span', row, number(point[1]), 'value');
    if (point[3] > point[2]) add('span', row, `${number(point[2])} to ${number(point[3])}`, 'muted');
  }
  if (found.length > 14) add('div', box, `and ${found.length - 14} more`, 'muted');
  if (state.scale !== 'step' && found.length) add('div', box, axisText(found[0][1][0]), 'muted');
  return box;
}
function point(chart, at, event) {
  state.at = at;
  for (const other of charts) cross(other);
  tell(at === null || !chart.series?.length ? null : tipOf(chart), event);
}
function watchPointer(chart) {
  let from = null, box = null;
  const bucketAt = event => {
    const rect = chart.svg.getBoundingClientRect();
    const left = (event.clientX - rect.left) * chart.width / rect.width;
    const found = chart.series.flatMap(one => one.points).reduce((best, p) => {
      const far = Math.abs(chart.x(p[0]) - left);
      return !best || far < best[0] ? [far, p[4]] : best;
    }, null);
    return found && [found[1], Math.min(Math.max(left, M.left), chart.width - M.right)];
  };
  chart.svg.addEventListener('pointermove', event => {
    const found = chart.series?.length && bucketAt(event);
    if (!found) return;
    point(chart, found[0], event);
    if (from) {
      box ??= make('rect', { class: 'box', y: M.top, height: M.height - M.top - M.bottom }, chart.svg);
      box.setAttribute('x', Math.min(from[1], found[1]));
      box.setAttribute('width', Math.abs(from[1] - found[1]));
    }
  });
  chart.svg.addEventListener('pointerdown', event => {
    if (event.pointerType === 'mouse' && event.button === 0 && chart.series?.length) { from = bucketAt(event); event.preventDefault(); chart.svg.focus(); }
  });
  window.addEventListener('pointerup', event => {
    if (!from) return;
    const to = bucketAt(event), begin = from;
    from = null;
    box?.remove();
    box = null;
    if (to && Math.abs(to[1] - begin[1]) > 8 && to[0] !== begin[0]) {
      state.range = [Math.min(begin[0], to[0]), Math.max(begin[0], to[0])];
      redraw();
    }
  });
  chart.svg.addEventListener('dblclick', () => { state.range = null; redraw(); });
  chart.svg.addEventListener('pointerleave', event => point(chart, null, event));
  chart.svg.addEventListener('blur', event => point(chart, null, event));
  chart.svg.addEventListener('keydown', event => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === 'Escape') { state.range = null; redraw(); return; }
    if (!by || !chart.series?.length) return;
    event.preventDefault();
    const buckets = [...new Set(chart.series.flatMap(one => one.points.map(p => p[4])))].sort((a, b) => a - b);
    const now = state.at === null ? buckets.length - 1 : buckets.findIndex(bucket => bucket >= state.at) + by;
    const rect = chart.svg.getBoundingClientRect();
    point(chart, buckets[Math.min(Math.max(now, 0), buckets.length - 1)], { clientX: rect.left + rect.width / 2, clientY: rect.bottom });
  });
}
const isShown = chart => chart.figure.isConnected && !chart.figure.closest('details:not([open])');
function redraw() {
  byId('whole').hidden = !state.range;
  for (const chart of charts) if (isShown(chart)) draw(chart);
}

// ---- which charts there are
const SECTIONS = { actor: 'Actor', critic: 'Critic', reward: 'Reward', eval: 'Evaluation', time_s: 'Time, in seconds', memory_gb: 'Memory, in GB',
  perf: 'Speed', bytes: 'Bytes that moved', version: 'Versions of parameters' };
function layOut() {
  const opened = new Set([...document.querySelectorAll('#others details[open]')].map(one => one.dataset.name));
  charts.length = 0;
  for (const id of ['headlines', 'others']) byId(id).replaceChildren();
  const names = Object.keys(data.metrics);
  if (!names.length) { add('p', byId('headlines'), 'No step has been completed.', 'muted'); return; }
  if (state.find) {
    const words = state.find.toLowerCase().split(/\s+/);
    const found = names.filter(name => words.every(word => name.toLowerCase().includes(word)));
    if (!found.length) add('p', byId('headlines'), 'No metric has this name.', 'muted');
    for (const name of found.slice(0, 60)) addChart(name, byId('headlines'));
    redraw();
    return;
  }
  for (const name of data.headlines) addChart(name, byId('headlines'));
  const sections = new Map();
  for (const name of names) {
    const key = name.includes('/') ? name.slice(0, name.indexOf('/')) : '';
    if (!sections.has(key)) sections.set(key, []);
    sections.get(key).push(name);
  }
  const few = [...sections].filter(([key, own]) => own.length < 2 && !under(SECTIONS, key));
  for (const [key] of few) sections.delete(key);
  sections.set('', [...few.flatMap(([, own]) => own), ...(sections.get('') || [])]);
  if (!sections.get('').length) sections.delete('');
  for (const [key, own] of sections) {
    const box = add('details', byId('others')), head = add('summary', box, under(SECTIONS, key) || key || 'Other');
    add('span', head, own.length === 1 ? '1 curve' : `${own.length} curves`, 'muted');
    box.dataset.name = key;
    const fill = () => {
      if (!box.open) return;
      if (!box.querySelector('.grid')) { const grid = add('div', box, '', 'grid'); for (const name of own) addChart(name, grid); }
      for (const chart of charts) if (box.contains(chart.figure)) draw(chart);
    };
    box.addEventListener('toggle', fill);
    if (opened.has(key)) box.open = true;
  }
  redraw();
}
function legend() {
  const box = byId('legend');
  box.replaceChildren();
  byId('seeds').hidden = !data.groups.some(group => group.runs.length > 1);
  const shown = lines();
  box.hidden = shown.length < 2;
  byId('legend-hint').textContent = averages() ? 'A line is the mean of the seeds, its band goes from the lowest to the highest of them.'
    : data.grid[1] > 1 && shown.length <= 6 ? `A point is the mean of ${data.grid[1]} steps, its band goes from the lowest to the highest of them.` : '';
  for (const line of shown.slice(0, 80)) {
    const button = add('button', box, '', classes(line.colour));
    add('span', button, '', 'line');
    add('span', button, line.name, 'name');
    button.title = line.name;
    button.setAttribute('aria-pressed', !state.hidden.has(line.key));
    button.onclick = () => {
      if (!state.hidden.delete(line.key)) state.hidden.add(line.key);
      button.setAttribute('aria-pressed', !state.hidden.has(line.key));
      redraw();
    };
  }
  if (shown.length > 80) add('span', box, `and ${shown.length - 80} more`, 'muted');
}

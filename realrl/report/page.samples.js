// ---- responses: sorted, and one prompt at several steps
let shownRun = 0, shownCount = 12;
function samples() {
  const having = data.runs.map((_, i) => i).filter(i => data.samples[i]?.length);
  byId('samples').hidden = !having.length;
  if (!having.length) return;
  const select = byId('sample-run');
  if (!having.includes(shownRun)) shownRun = having[0];
  select.replaceChildren();
  for (const i of having) option(select, i, data.runs[i].name);
  select.value = shownRun;
  byId('whose').hidden = having.length < 2;
  select.onchange = () => { shownRun = +select.value; shownCount = 12; samples(); };
  for (const id of ['order', 'find']) byId(id).oninput = () => { shownCount = 12; list(); };
  byId('more').onclick = () => { shownCount += 24; list(); };
  dots();
  changes();
  list();
}
const scoreText = one => one.score === null ? 'no reward' : number(one.score);
const textOf = one => one.turns.map(turn => turn[1]).join('\n');
function ordered() {
  const words = byId('find').value.toLowerCase();
  const found = data.samples[shownRun].filter(one => !words || textOf(one).toLowerCase().includes(words));
  const score = one => one.score === null ? -Infinity : one.score;
  const orders = {
    best: (a, b) => score(b) - score(a) || b.step - a.step, worst: (a, b) => (a.score ?? Infinity) - (b.score ?? Infinity) || b.step - a.step,
    late: (a, b) => b.step - a.step || score(b) - score(a), early: (a, b) => a.step - b.step || score(b) - score(a),
    long: (a, b) => textOf(b).length - textOf(a).length,
  };
  return found.sort(orders[byId('order').value]);
}
function list() {
  const all = ordered(), box = byId('list'), shown = all.slice(0, shownCount);
  box.replaceChildren();
  const cards = add('div', box, '', 'cards');
  for (const one of shown) card(one, cards);
  const kept = data.samples[shownRun].length, whole = data.n_samples[shownRun];
  byId('sample-count').textContent = kept === whole ? `All ${number(whole)} responses of generations.jsonl.`
    : `${number(kept)} of ${number(whole)} responses of generations.jsonl: the best, the worst, prompts that came again, and some of all steps.`;
  byId('more').hidden = all.length <= shownCount;
}
function card(one, parent, before) {
  const box = add('article', parent, '', 'card-of');
  box.dataset.number = data.samples[shownRun].indexOf(one);
  meta(one, box, before);
  say(one.turns, box, before);
  fieldsOfRow(one, box);
  return box;
}
function meta(one, box, before) {
  const line = add('div', box, '', 'meta');
  add('span', line, scoreText(one), 'score');
  if (before && one.score !== null && before.score !== null && one.score !== before.score) change(one.score - before.score, line);
  add('span', line, `step ${number(one.step)}`);
  for (const [name, value] of Object.entries(one.fields)) {
    if (value === true) add('span', line, name);
    else if (name === 'response_tokens') add('span', line, value === 1 ? '1 token' : `${number(value)} tokens`);
    else if (name === 'prompt_tokens') continue;
    else if (value !== false && !(value === one.score && /^rewards?$/.test(name))) add('span', line, `${name} ${number(value)}`);
  }
  const about = Object.entries(one.about).map(([name, value]) => `${name} ${value}`).join(' · ');
  line.title = plainly(about);
}
function change(by, line) {
  add('span', line, `${by > 0 ? '▲' : '▼'} ${number(Math.abs(by))}`, by > 0 ? 'up' : 'down');
}
function fieldsOfRow(one, box) {
  const fields = Object.entries(one.row);
  if (!fields.length) return;
  const line = add('div', add('div', box, '', 'turn'), '', 'meta');
  for (const [name, value] of fields) add('span', line, `${plainly(name)}: ${plainly(value)}`);
}
const isAnswer = who => who === 'response' || who === 'assistant';
// turns; each answer is compared with the one at its place before
function say(turns, box, before) {
  const answers = before ? before.turns.filter(([who]) => isAnswer(who)) : [];
  for (const [who, text] of turns) turn(who, text, box, isAnswer(who) && answers.length ? answers.shift()[1] : null);
}
function turn(who, text, box, old) {
  const part = add('div', box, '', 'turn');
  add('div', part, who, 'who');
  const said = add('div', part, '', `said ${isAnswer(who) ? '' : 'prompt'}`);
  said.dir = 'auto';
  if (text.length > 900) said.tabIndex = 0;
  if (old !== null) differ(old, text, said);
  else found(text, said);
  if (!text.trim()) add('span', said, text ? '(blank)' : '(nothing)', 'muted');
}
function found(text, said) {
  const words = byId('find').value, shown = plainly(text);
  let at = 0;
  for (let next = words ? shown.toLowerCase().indexOf(words.toLowerCase()) : -1; next >= 0; next = shown.toLowerCase().indexOf(words.toLowerCase(), at)) {
    said.append(shown.slice(at, next));
    add('mark', said, shown.slice(next, next + words.length));
    at = next + words.length;
  }
  said.append(shown.slice(at));
}
// words of the new text, those that the old one lacks marked, and those that went
function differ(old, text, said) {
  const a = plainly(old).split(/(\s+)/), b = plainly(text).split(/(\s+)/);
  if (a.length * b.length > 360000) { said.append(plainly(text)); return; }
  const common = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--) {
    common[i][j] = a[i] === b[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
  }
  const parts = [];
  const put = (kind, word) => {
    if (parts.length && parts[parts.length - 1][0] === kind) parts[parts.length - 1][1] += word; else parts.push([kind, word]);
  };
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { put('', a[i]); i++; j++; }
    else if (j >= b.length || (i < a.length && common[i + 1][j] >= common[i][j + 1])) put('del', a[i++]);
    else put('ins', b[j++]);
  }
  const kept = parts.filter(part => part[0] === '').reduce((sum, part) => sum + part[1].trim().length, 0);
  if (kept < text.length / 5) { said.append(plainly(text)); return; } // another text altogether
  for (const [kind, words] of parts) if (kind) add(kind, said, words); else said.append(words);
}
// a prompt at several steps; without any, responses of the first and of the last steps
function changes() {
  const all = data.samples[shownRun], box = byId('changes'), byKey = new Map();
  box.replaceChildren();
  for (const one of all) {
    if (!byKey.has(one.key)) byKey.set(one.key, new Map());
    const steps = byKey.get(one.key);
    if (!steps.has(one.step)) steps.set(one.step, one);
  }
  const stories = [...byKey.values()].map(steps => [...steps.values()].sort((a, b) => a.step - b.step)).filter(story => story.length > 1);
  const gain = story => Math.abs((story[story.length - 1].mean[1] ?? 0) - (story[0].mean[1] ?? 0));
  stories.sort((a, b) => b.length - a.length || gain(b) - gain(a));
  const first = all[0]?.step, last = all[all.length - 1]?.step;
  byId('changes-title').hidden = first === last;
  byId('changes-note').textContent = first === last ? '' : stories.length
    ? 'A prompt, and the responses to it at several steps. Words that a response has and the one before it lacks are green, those that went are red.'
    : `No prompt came twice among the responses that were kept. Responses around the median reward of the first and of the last steps:`;
  if (first === last) return;
  if (!stories.length) {
    const lane = add('div', box, '', 'lane');
    for (const some of [early(all), early([...all].reverse())]) { const column = add('div', lane, '', ''); for (const one of some) { card(one, column).style.marginBottom = '10px'; } }
    return;
  }
  stories.slice(0, 3).forEach(story => tellStory(story, box));
  if (stories.length <= 3) return;
  const rest = add('details', box);
  add('summary', rest, stories.length === 4 ? 'one more prompt' : `${stories.length - 3} more prompts`);
  rest.addEventListener('toggle', () => {
    if (rest.open && rest.childNodes.length === 1) for (const story of stories.slice(3)) tellStory(story, rest);
  });
}
function early(all) {
  const some = all.slice(0, Math.max(3, Math.ceil(all.length / 10))).sort((a, b) => (a.score ?? 0) - (b.score ?? 0));
  const middle = Math.max(0, Math.floor((some.length - 3) / 2));
  return some.slice(middle, middle + 3);
}
function tellStory(story, parent) {
  const box = add('div', parent, '', 'story');
  const first = turns => { const at = turns.findIndex(([who]) => isAnswer(who)); return at < 0 ? turns.length : at; };
  say(story[0].turns.slice(0, first(story[0].turns)), box);
  fieldsOfRow(story[0], box);
  const lane = add('div', box, '', 'lane');
  story.forEach((one, i) => {
    const cell = add('div', lane), before = story[i - 1];
    const several = one.mean[0] > 1 || before?.mean[0] > 1;
    if (several) {
      const line = add('div', cell, '', 'meta'), by = before ? one.mean[1] - before.mean[1] : 0;
      add('span', line, number(one.mean[1]), 'score');
      if (by) change(by, line);
      add('span', line, `mean of ${one.mean[0]} at step ${number(one.step)}; one of them:`);
    }
    meta(one, cell, several ? undefined : before);
    say(one.turns.slice(first(one.turns)), cell, before);
  });
}
// every sample as a dot, reward over steps
function dots() {
  const box = byId('dots'), all = data.samples[shownRun].filter(one => one.score !== null);
  box.replaceChildren();
  if (all.length < 3 || new Set(all.map(one => one.step)).size < 2) return;
  const width = Math.max(280, box.clientWidth), height = 150, left = 46, right = 10, top = 8, bottom = 20;
  const svg = make('svg', { viewBox: `0 0 ${width} ${height}`, class: 'c0', role: 'img', 'aria-label': 'reward of each sample over steps' }, box);
  let low = Math.min(...all.map(one => one.score)), high = Math.max(...all.map(one => one.score));
  if (low === high) { low -= 0.5; high += 0.5; }
  const first = Math.min(...all.map(one => one.step)), last = Math.max(...all.map(one => one.step));
  const x = step => left + (step - first) / (last - first) * (width - left - right);
  const y = score => height - bottom - (score - low) / (high - low) * (height - top - bottom - 8) - 4;
  for (const v of ticks(low, high, 4)) {
    make('line', { class: 'tick', x1: left, x2: width - right, y1: y(v), y2: y(v) }, svg);
    make('text', { class: 'label', x: left - 6, y: y(v) + 3.5, 'text-anchor': 'end' }, svg, number(v));
  }
  for (const v of ticks(first, last, Math.max(2, Math.floor(width / 110)))) {
    if (Number.isInteger(v)) make('text', { class: 'label', x: Math.min(x(v), width - 22), y: height - 5, 'text-anchor': 'middle' }, svg, number(v));
  }
  for (const one of all) {
    const dot = make('circle', { cx: x(one.step), cy: y(one.score), r: 4 }, svg);
    dot.addEventListener('pointermove', event => tell(`step ${number(one.step)}, reward ${scoreText(one)}\n${plainly(one.turns[one.turns.length - 1][1]).slice(0, 240)}`, event));
    dot.addEventListener('pointerleave', event => tell('', event));
    dot.addEventListener('click', () => {
      byId('find').value = '';
      shownCount = Math.max(shownCount, ordered().indexOf(one) + 1);
      list();
      const card = document.querySelector(`#list [data-number="${data.samples[shownRun].indexOf(one)}"]`);
      card?.classList.add('hit');
      card?.scrollIntoView({ block: 'center' });
    });
  }
}

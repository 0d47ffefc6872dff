// ---- head, runs, settings
const ends = (metric, run) => {
  const points = pointsOf(metric, run), tenth = Math.max(1, Math.ceil(points.length / 10));
  const mean = some => some.length ? some.reduce((sum, p) => sum + p[1], 0) / some.length : null;
  return [mean(points.slice(0, tenth)), mean(points.slice(-tenth))];
};
function head() {
  const one = data.runs.length === 1 ? data.runs[0] : null, facts = byId('facts');
  document.title = byId('title').textContent = data.title;
  byId('subtitle').textContent = one ? `${one.path} · ${one.state}` : `made ${new Date(data.made * 1000).toLocaleString()}`;
  facts.replaceChildren();
  const fact = (name, text) => { if (text) { const box = add('div', facts); add('dt', box, name); add('dd', box, text); } };
  if (!one) {
    fact('runs', String(data.runs.length));
    fact('going on', data.runs.filter(run => run.live).length ? String(data.runs.filter(run => run.live).length) : '');
    fact('time of all', span(data.runs.reduce((sum, run) => sum + (run.seconds || 0), 0)));
    return;
  }
  const kept = state.scale;
  state.scale = 'step';
  const [begin, end] = data.headline ? ends(data.headline, 0) : [null, null];
  state.scale = kept;
  fact('steps', one.steps ? `${number(one.done)} of ${number(one.steps)}` : number(one.done));
  if (begin !== null) fact(data.headline, begin === end ? number(end) : `${number(begin)} → ${number(end)}`);
  fact('time', one.seconds ? span(one.seconds) : '');
  fact('a step', one.step_s ? seconds(one.step_s) : '');
  fact('tokens a second', one.tokens_per_s ? number(Math.round(one.tokens_per_s)) : '');
  fact('fullest worker', one.memory_gb ? gigabytes(one.memory_gb) : '');
  fact('began again', one.attempts.length ? `${one.attempts.length}×` : '');
}
function row(table, cells, tag = 'td') {
  const line = add('tr', table);
  for (const [text, className] of cells) add(tag, line, text, className);
  return line;
}
function runsTable() {
  byId('runs').hidden = data.runs.length < 2;
  const table = byId('table');
  table.replaceChildren();
  if (data.runs.length < 2) return;
  const again = data.runs.some(run => run.attempts.length);
  const differences = data.differences.filter(([path, , values]) => !['seed', 'experiment', 'preset'].includes(path) && !values.includes('')).slice(0, 4);
  const number_ = text => [text, 'number'], kept = state.scale;
  const heads = ['run', 'experiment', 'seed', ...differences.map(([, name]) => name), 'state', 'steps', data.headline || 'metric', 'time', 'a step', 'tokens/s', 'memory', ...(again ? ['began again'] : [])];
  const first = 4 + differences.length; // the columns from here on are numbers
  state.scale = 'step';
  const found = data.runs.map((run, i) => {
    const [begin, end] = ends(data.headline, i);
    const values = [run.name, run.experiment, run.seed, ...differences.map(([, , values]) => values[i]), run.state, run.done, end, run.seconds, run.step_s, run.tokens_per_s, run.memory_gb, ...(again ? [run.attempts.length] : [])];
    const cells = [[''], [run.experiment || '–'], [run.seed === null ? '–' : String(run.seed)], ...differences.map(([, , values]) => [values[i], 'wrap']), ['', 'wrap'],
      ...[number(run.done), begin === null ? '–' : `${number(begin)} → ${number(end)}`, span(run.seconds), run.step_s ? seconds(run.step_s) : '–',
        run.tokens_per_s ? number(Math.round(run.tokens_per_s)) : '–', gigabytes(run.memory_gb), ...(again ? [run.attempts.length ? `${run.attempts.length}×` : ''] : [])].map(number_)];
    return { run, i, values, cells };
  });
  const [column, sign] = state.sort, value = one => one.values[column];
  if (column < heads.length) {
    const compare = (a, b) => typeof a === 'number' && typeof b === 'number' ? a - b : !isNaN(a) && !isNaN(b) ? a - b : String(a).localeCompare(String(b), 'en', { numeric: true });
    found.sort((a, b) => (value(a) === null) - (value(b) === null) || sign * compare(value(a), value(b)) || a.i - b.i);
  }
  const top = row(add('thead', table), heads.map((_, at) => ['', at >= first ? 'number' : '']), 'th');
  heads.forEach((name, at) => {
    const button = add('button', top.cells[at], name + (at === column ? (sign > 0 ? ' ▲' : ' ▼') : ''), 'plain');
    button.title = 'Sort by this';
    button.onclick = () => { state.sort = [at, at === column ? -sign : at >= first ? -1 : 1]; runsTable(); };
  });
  const body = add('tbody', table);
  for (const { run, i, cells } of found) {
    const line = row(body, cells), colour = averages() ? data.groups.findIndex(group => group.runs.includes(i)) : i;
    add('span', line.cells[0], '', `line ${classes(colour)}`);
    line.cells[0].append(run.name);
    line.cells[0].title = run.path;
    const cell = line.cells[first - 1];
    add('span', cell, '', run.live ? 'dot' : 'dot off');
    cell.append(run.state.replace(/^(complete|going on),.*/, '$1'));
  }
  state.scale = kept;
}
function differences(found, box) {
  if (!found.length) return;
  const table = add('table', add('div', box, '', 'wide')), text = value => [value === '' ? '–' : value, 'wrap'];
  const heads = data.runs.length <= 6 ? ['key', ...data.runs.map(run => run.name)] : ['run', ...found.map(([, name]) => name)];
  row(add('thead', table), heads.map(name => [name, 'wrap']), 'th');
  const body = add('tbody', table);
  if (data.runs.length <= 6) for (const [path, , values] of found) row(body, [[path], ...values.map(text)]);
  else data.runs.forEach((run, i) => row(body, [[run.name], ...found.map(([, , values]) => text(values[i]))]));
}
function settings() {
  const box = byId('differences'), all = byId('all-settings');
  box.replaceChildren();
  all.replaceChildren();
  if (data.runs.length > 1 && !data.differences.length) add('p', box, 'The settings of these runs are the same.', 'muted');
  if (data.differences.length) {
    add('p', box, 'Settings that differ.', 'muted');
    differences(data.differences.filter(([, , values]) => !values.includes('')), box);
    const some = data.differences.filter(([, , values]) => values.includes(''));
    if (some.length) {
      const rest = add('details', box);
      add('summary', rest, some.length === 1 ? 'A setting that only some of the runs have' : `${some.length} settings that only some of the runs have`);
      differences(some, rest);
    }
  }
  byId('settings-of').textContent = data.runs.length > 1 ? ` of ${data.runs[0].name}` : '';
  for (const [path, value] of data.settings) row(all, [[path], [value, 'wrap']]);
  byId('notes').hidden = !data.notes.length;
  byId('note-list').replaceChildren();
  for (const [name, notes] of data.notes) for (const note of notes) add('li', byId('note-list'), data.runs.length > 1 ? `${name}: ${note}` : note);
}
function contents() {
  const box = byId('contents');
  box.replaceChildren();
  for (const section of document.querySelectorAll('section')) {
    if (section.hidden) continue;
    const link = add('a', box, section.querySelector('h2').textContent);
    link.href = `#${section.id}`;
  }
}

// ---- all of it, and again when there is news
function show() {
  head(); runsTable(); legend(); layOut(); samples(); times(); settings(); contents();
}
let fails = 0;
async function news() {
  try {
    const answer = await fetch('data.json', { cache: 'no-store' });
    if (!answer.ok) throw new Error(answer.status === 503 ? await answer.text() : `the server answers ${answer.status}`);
    const fresh = await answer.json();
    fails = 0;
    if (fresh.made !== data.made) {
      const plans = fresh.runs.map(run => data.plans[data.runs.findIndex(old => old.path === run.path)] ?? null);
      data = { ...fresh, plans, live: true };
      const at = window.scrollY;
      show();
      window.scrollTo(0, at);
    }
    byId('pulse').textContent = data.runs.some(run => run.live) ? 'live' : 'no run goes on';
  } catch (error) {
    fails += 1;
    byId('pulse').textContent = error instanceof TypeError ? 'the server is gone' : error.message;
  }
  setTimeout(news, Math.min(60000, 2000 * 2 ** Math.min(fails, 5)));
}
function start() {
  const change = (id, event, act) => byId(id).addEventListener(event, () => { act(byId(id)); });
  change('smooth', 'input', one => { state.smooth = +one.value; redraw(); });
  change('scale', 'change', one => { state.scale = one.value; redraw(); });
  change('log', 'change', one => { state.log = one.checked; redraw(); });
  change('average', 'change', one => { state.average = one.checked; state.hidden.clear(); legend(); runsTable(); redraw(); });
  change('filter', 'input', one => { state.find = one.value.trim(); layOut(); });
  byId('whole').onclick = () => { state.range = null; redraw(); };
  let width = innerWidth;
  addEventListener('resize', () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
  addEventListener('beforeprint', () => redraw());
  show();
  if (data.live) news();
}

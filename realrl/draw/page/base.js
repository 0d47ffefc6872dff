'use strict';
const byId = id => document.getElementById(id);
const tip = byId('tip');
document.documentElement.classList.add('js');
function make(tag, attributes, parent, text) {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}
function seconds(s) {
  if (s >= 100) return Math.round(s).toLocaleString('en') + ' s';
  if (s >= 1 || s === 0) return +s.toPrecision(3) + ' s';
  return s >= 1e-3 ? +(s * 1e3).toPrecision(3) + ' ms' : +(s * 1e6).toPrecision(3) + ' us';
}
// shows a text, or elements, beside a place of the window; nothing hides what was shown
function tell(content, event) {
  tip.replaceChildren(...(content ? [content] : []));
  if (!content) return;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + 'px';
  tip.style.top = Math.max(4, event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 12 : event.clientY + 18) + 'px';
}
byId('theme').onclick = () => {
  const root = document.documentElement;
  const now = root.dataset.theme || (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light');
  root.dataset.theme = now === 'dark' ? 'light' : 'dark';
};

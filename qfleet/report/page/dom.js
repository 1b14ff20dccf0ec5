"use strict";
// Elements, numbers as text, and ticks. Uses no library; data never becomes markup.

function made(space, tag, attributes, children) {
  const node = space ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  const present = child => child !== null && child !== undefined && child !== false;
  node.append(...children.flat(Infinity).filter(present));
  return node;
}

const el = (tag, attributes, ...children) => made(false, tag, attributes, children);
const svg = (tag, attributes, ...children) => made(true, tag, attributes, children);

function figure(value) {  // formats a number of any size in few characters
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return `${size !== 0 && size < 1e-3 ? value.toExponential(1) : +value.toPrecision(size >= 100 ? 4 : 3)}`;
}

const percent = share => `${Math.round(100 * share)} %`;

function clock(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const whole = Math.round(seconds), pad = part => String(part).padStart(2, "0");
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  return h ? `${h}:${pad(m)}:${pad(s)}` : `${m}:${pad(s)}`;
}

const CLOCK_STEPS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400];

function tickStep(raw, timed) {
  const power = 10 ** Math.floor(Math.log10(raw));
  const steps = timed && raw <= 86400 ? CLOCK_STEPS : [1, 2, 2.5, 5, 10].map(part => part * power);
  return steps.find(part => part >= raw) || raw;
}

function ticks(low, high, count, timed) {  // [value, text] of round values; all texts of an axis have the same format
  const step = tickStep((high - low || 1) / Math.max(1, count), timed), found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step || 0);
  const most = Math.max(Math.abs(low), Math.abs(high));
  return found.map(value => [value, timed ? clock(value) : tickText(value, step, most)]);
}

const UNITS = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];

function tickText(value, step, most) {  // as many decimals as the step has, in the unit of the largest value
  if (value === 0) return "0";
  if (most < 1e-4 || most >= 1e12) return value.toExponential(1);
  const fits = ([unit, letter]) => most >= unit && (letter !== "k" || step >= 10);
  const [unit, letter] = UNITS.find(fits) || [1, ""];
  const size = step / unit, whole = Math.floor(Math.log10(size) + 1e-9);
  const two = Math.abs(size / 10 ** whole - 2.5) < 1e-6, digits = Math.max(0, two - whole);
  return (value / unit).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + letter;
}

function section(title, ...content) {
  const id = title.toLowerCase().replace(/\W+/g, "-");
  return el("section", { "aria-labelledby": id }, el("h2", { id }, title), content);
}

function download(name, type, text) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

"use strict";
// Downloads of a chart: its data as CSV, its picture as SVG with the colours of the current theme.

const quoted = value => /[",\r\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value);

const fileName = (title, ending) => `${title.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "chart"}.${ending}`;

function csvOf(spec, curves) {  // the shown points as they were logged, one per line
  const shown = x => !spec.range || (x >= spec.range[0] && x <= spec.range[1]);
  const rows = curves.flatMap(({ label, raw }) => raw.flatMap(({ name, xs, ys }) => xs.map((x, i) => [label, name, x, ys[i]])))
    .filter(([, , x]) => shown(x));
  const value = spec.unit ? `${spec.title} (${spec.unit})` : spec.title;
  const unit = spec.timed ? `${spec.xLabel} (s)` : spec.xLabel;
  return [["configuration", "run", unit, value], ...rows].map(row => row.map(quoted).join(",") + "\r\n").join("");
}

const INKS = ["fill", "stroke"];

function svgOf(picture, spec, curves) {  // a file of its own: colours instead of variables, with title and legend
  const copy = picture.cloneNode(true), style = name => getComputedStyle(document.body).getPropertyValue(name);
  const originals = [...picture.querySelectorAll("*")];
  [...copy.querySelectorAll("*")].forEach((node, place) => {
    const seen = getComputedStyle(originals[place]);
    if (seen.visibility === "hidden" && node.localName !== "clipPath") { node.setAttribute("class", "unseen"); return; }
    INKS.forEach(ink => { if (node.hasAttribute(ink) || node.localName === "text") node.setAttribute(ink, seen[ink]); });
    if (node.localName === "text") node.setAttribute("font-size", "11");
  });
  copy.querySelectorAll(".unseen").forEach(node => node.remove());
  const [, , width, height] = picture.getAttribute("viewBox").split(" ").map(Number), top = 30 + 18 * curves.length;
  const text = (x, y, size, words) => svg("text", { x, y, "font-size": size, fill: style("color") }, words);
  const legend = curves.map(({ label, index }, row) => {
    const sample = picture.parentNode.appendChild(lineSample(index)), parts = [...sample.children].map(part => {
      const fixed = part.cloneNode(true);
      INKS.forEach(ink => fixed.setAttribute(ink, getComputedStyle(part)[ink]));
      return fixed;
    });
    sample.remove();
    return svg("g", {}, svg("g", { transform: `translate(16 ${32 + 18 * row})` }, parts), text(58, 42 + 18 * row, 12, label));
  });
  copy.setAttribute("y", top); copy.setAttribute("width", width);
  const whole = svg("svg", { viewBox: `0 0 ${width} ${height + top}`, width, height: height + top, "font-family": "sans-serif" },
    svg("rect", { width: "100%", height: "100%", fill: style("background-color") }), text(16, 20, 14, spec.title), legend, copy);
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(whole)}\n`;
}

function exportButtons(chart) {
  const button = (name, words, act) => el("button", { type: "button", class: "export", title: words, onclick: act }, name);
  const title = () => chart.state.spec.title;
  return el("span", { class: "exports" },
    button("CSV", "Download the shown data as CSV", () => {
      download(fileName(title(), "csv"), "text/csv", csvOf(chart.state.spec, chart.state.curves)); }),
    button("SVG", "Download this chart as SVG", () => {
      download(fileName(title(), "svg"), "image/svg+xml", svgOf(chart.plot.querySelector("svg"), chart.state.spec, chart.state.curves)); }));
}

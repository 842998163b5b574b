// Charts: figures are JSON in <script type="application/json" data-chart="id">, drawn into [data-chart-for="id"].
// Colours in a figure are token references ("var(--series-1)"), so a theme change only draws again.
// Plotly is loaded when the first figure appears. Without it the text alternative and the table remain.
const NARROW_PX = 520;
const CONFIG = { displayModeBar: false, displaylogo: false, responsive: false, scrollZoom: false, doubleClick: "reset" };
const figures = new Map();
let loading = null;

function plotly() {
  loading ??= new Promise((resolve, reject) => {
    if (window.Plotly) return resolve(window.Plotly);
    const script = document.createElement("script");
    script.src = document.querySelector("meta[name=plotly]").content;
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => reject(new Error("The chart library did not load"));
    document.head.append(script);
  });
  return loading;
}

function tokenReader() {
  const probe = document.createElement("i");
  probe.hidden = true;
  document.body.append(probe);
  const seen = new Map();
  return {
    read(reference) {
      if (!seen.has(reference)) {
        probe.style.color = reference;
        seen.set(reference, getComputedStyle(probe).color);
      }
      return seen.get(reference);
    },
    done: () => probe.remove(),
  };
}

function resolve(value, read) {
  if (typeof value === "string") return value.startsWith("var(--") || value.startsWith("color-mix(") ? read(value) : value;
  if (Array.isArray(value)) return typeof value[0] === "number" ? value.slice() : value.map((item) => resolve(item, read));
  if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, resolve(item, read)]));
  return value;
}

const INSTANT = /^\d{4}-\d\d-\d\dT[\d:.]+(Z|\+00:00)$/;
const pad = (number, width = 2) => String(number).padStart(width, "0");

/** Plotly draws a date as written, so an instant in UTC is written in the viewer's zone first. */
function viewerZone(value) {
  if (typeof value !== "string" || !INSTANT.test(value)) return value;
  const at = new Date(value);
  return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())} ${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}.${pad(at.getMilliseconds(), 3)}`;
}

function inViewerZone(figure) {
  const points = (item) => Object.fromEntries(["x", "x0", "x1"].filter((key) => key in item).map((key) => [key, Array.isArray(item[key]) ? item[key].map(viewerZone) : viewerZone(item[key])]));
  const all = (items) => (items ?? []).map((item) => ({ ...item, ...points(item) }));
  const layout = figure.layout ?? {};
  return { data: all(figure.data), layout: { ...layout, shapes: all(layout.shapes), annotations: all(layout.annotations) } };
}

/** Clock times alone when the axis spans less than a day and a half. */
function timeAxis(figure) {
  const x = figure.data?.find((trace) => Array.isArray(trace.x) && trace.x.length)?.x;
  if (!x || typeof x[0] !== "string" || !INSTANT.test(x[0])) return {};
  const span = Date.parse(x.at(-1)) - Date.parse(x[0]);
  return { type: "date", tickformat: span < 300_000 ? "%H:%M:%S" : span < 129_600_000 ? "%H:%M" : "%-d %b", hoverformat: span < 129_600_000 ? "%H:%M:%S" : "%-d %b %H:%M" };
}

function axis(read, given = {}) {
  return {
    gridcolor: read("var(--line)"), linecolor: read("var(--line-strong)"), zerolinecolor: read("var(--line-strong)"),
    tickcolor: read("var(--line-strong)"), separatethousands: true, exponentformat: "none", automargin: true, fixedrange: true, ...given,
    tickfont: { color: read("var(--muted)"), size: 11, ...given.tickfont },
  };
}

/** Pixels at the right for the longest name at a line's end. */
function labelRoom(layout) {
  const names = (layout.annotations ?? []).filter((note) => note.name === "direct").map((note) => note.text.length);
  return Math.max(96, Math.ceil(Math.max(0, ...names) * 6.5) + 12);
}

/** The house template under a figure's own layout. */
function layoutOf(figure, read, narrow) {
  const own = resolve(figure.layout ?? {}, read);
  const family = getComputedStyle(document.documentElement).getPropertyValue("--font").trim();
  const layout = {
    autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", separators: ".,", bargap: 0.18,
    font: { family, size: 11, color: read("var(--muted)") }, showlegend: false, hovermode: "x unified",
    hoverlabel: { bgcolor: read("var(--raised)"), bordercolor: read("var(--line-strong)"), font: { family, size: 12, color: read("var(--text)") } },
    ...own,
    margin: { l: 44, r: labelRoom(own), t: 12, b: 28, ...own.margin },
    height: undefined,
    xaxis: axis(read, { showgrid: false, ...own.xaxis }),
    yaxis: axis(read, { rangemode: "tozero", ...own.yaxis }),
  };
  if (narrow) {
    layout.annotations = (own.annotations ?? []).filter((note) => note.name !== "direct");
    layout.showlegend = (figure.data ?? []).length > 1;
    layout.legend = { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" };
    layout.margin = { ...layout.margin, r: 12, t: 24 };
  }
  return layout;
}

async function draw(id) {
  const place = document.querySelector(`[data-chart-for="${CSS.escape(id)}"]`);
  if (!place || !figures.has(id)) return;
  const given = figures.get(id);
  const figure = place.closest("[data-fixed-zone]") ? given : inViewerZone(given);
  const Plotly = await plotly();
  const reader = tokenReader();
  const data = resolve(figure.data ?? [], reader.read);
  const layout = { ...layoutOf(figure, reader.read, place.clientWidth < NARROW_PX) };
  Object.assign(layout.xaxis, timeAxis(given));
  // Wide enough: numbers beside bars keep one size. On a phone Plotly may shrink them; the table has them too.
  if (place.clientWidth >= NARROW_PX) for (const trace of data) if (trace.type === "bar" && trace.text) trace.constraintext = "none";
  reader.done();
  await Plotly.react(place, data, layout, CONFIG);
  place.dataset.ready = "1";
}

function report(error) {
  for (const place of document.querySelectorAll("[data-chart-for]:not([data-ready])")) {
    place.closest(".chart")?.querySelector(".chart-text")?.classList.remove("visually-hidden");
    place.hidden = true;
  }
  console.error(error);
}

let pending = null;
function redrawAll() {
  pending ??= requestAnimationFrame(() => {
    pending = null;
    for (const id of figures.keys()) draw(id).catch(report);
  });
}

const widths = new WeakMap();
const observer = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const before = widths.get(target);
    widths.set(target, contentRect.width);
    if (before !== undefined && Math.abs(before - contentRect.width) > 1) draw(target.dataset.chartFor).catch(report);
  }
});

/** Draw every figure under root that is not drawn yet. */
export function scan(root) {
  for (const script of root.querySelectorAll("script[type='application/json'][data-chart]")) {
    const id = script.dataset.chart;
    figures.set(id, JSON.parse(script.textContent));
    const place = document.querySelector(`[data-chart-for="${CSS.escape(id)}"]`);
    if (place) observer.observe(place);
    draw(id).catch(report);
  }
}

/** Replace a figure's data (and layout keys, when given) and draw it; for live pages. */
export function update(id, data, layout = {}) {
  const before = figures.get(id) ?? { layout: {} };
  figures.set(id, { data, layout: { ...before.layout, ...layout } });
  return draw(id).catch(report);
}

document.addEventListener("flexband:theme", redrawAll);

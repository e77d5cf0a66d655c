"use strict";
// Asks for the view, draws it, and keeps what it has seen for the charts. Where there is no value it draws none: a
// chart has a gap, and a panel says "no data" with the reason that the view gives.
const POLL_MS = 2000;
const KEPT = 900;
const SILENT_S = 30; // nothing is published while nothing happens, so that this is no fault by itself
const CHART_PX = 170;

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const make = (tag, text, style) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (style) node.className = style;
  return node;
};
const known = (value) => value !== null && value !== undefined;
const whole = (value) => Math.round(value).toLocaleString("en");
const percent = (share) => `${(share * 100).toFixed(1)} %`;
const perSecond = (value) => `${value >= 100 ? whole(value) : value.toFixed(1)} /s`;
const seconds = (value) => {
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  return value < 7200 ? `${Math.floor(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
};

function noData(why) {
  const box = make("div", undefined, "none");
  box.append(make("b", "no data"), `: ${why || "the exporter does not say why"}`);
  return box;
}

function table(rows) {
  const drawn = make("table");
  for (const [label, value, style] of rows) {
    const row = make("tr");
    row.append(make("td", label), make("td", value, style));
    drawn.append(row);
  }
  return drawn;
}

// Charts. Each line takes one number out of an engine's view. A stacked chart draws sums, the highest first, and tells
// the single values in its legend.
const of = (part, take) => (engine) => (engine[part] === null ? null : (take(engine[part]) ?? null));
const CHARTS = [
  {
    title: "Usage", part: "pool", axis: (v) => `${v} %`, top: 100,
    lines: [["usage", "used", of("pool", (p) => (known(p.usage) ? p.usage * 100 : null)), (v) => `${v.toFixed(1)} %`]],
    now: (engine) => (known(engine.pool.usage) ? percent(engine.pool.usage) : null),
  },
  {
    title: "Blocks by state", part: "pool", stacked: true, axis: (v) => whole(v),
    lines: ["used", "held", "cached", "null", "free"].map((s) => [s, s, of("pool", (p) => p.blocks[s]), whole]),
    now: (engine) => `${whole(Object.values(engine.pool.blocks).reduce((a, b) => a + b, 0))} blocks`,
  },
  {
    title: "Prefix cache hits", part: "reuse", axis: (v) => `${v} %`, top: 100,
    lines: [["tokens", "token", "used"], ["blocks", "block", "second"]].map(([label, unit, colour]) => [
      label, colour, of("reuse", (r) => (known(r.window[unit]) ? r.window[unit] * 100 : null)), (v) => `${v.toFixed(1)} %`,
    ]),
    now: (engine) => (known(engine.reuse.window.token) ? percent(engine.reuse.window.token) : null),
    why: "nothing was queried within the window",
    note: (engine) => "since the start: " + Object.entries(engine.reuse.since_start)
      .map(([unit, share]) => `${percent(share)} of ${whole(engine.reuse.queries[unit])} ${unit}s`).join(", "),
  },
  {
    title: "Transfers, prefill to decode", part: "transfers", axis: (v) => whole(v),
    lines: [
      ["sent tokens/s", "used", of("transfers", (t) => t.tokens_per_s.sent), whole],
      ["received tokens/s", "second", of("transfers", (t) => t.tokens_per_s.received), whole],
      ["queued", "held", of("transfers", (t) => t.queued), whole],
      ["in flight", "null", of("transfers", (t) => t.in_flight), whole],
    ],
    now: (engine) => engine.transfers.connector,
    note: (engine) => transferNote(engine.transfers),
  },
];

function transferNote(transfers) {
  const said = [];
  for (const [name, latency] of [["latency", transfers.latency], ["wait", transfers.wait]]) {
    if (latency && latency.count && known(latency.p50_s)) {
      said.push(`${name} P50 ${seconds(latency.p50_s)}, P95 ${seconds(latency.p95_s)} of ${whole(latency.count)}`);
    }
  }
  for (const [cause, count] of Object.entries(transfers.failures)) said.push(`failed: ${cause} ${whole(count)}`);
  return said.join(" · ");
}

class Chart {
  constructor(plan, parent) {
    this.plan = plan;
    this.times = [];
    this.raw = plan.lines.map(() => []);
    this.node = make("section");
    const title = make("h2", plan.title);
    this.now = make("span", "", "now");
    title.append(this.now);
    this.body = make("div");
    this.note = make("p", "", "note");
    this.empty = make("div");
    this.node.append(title, this.body, this.empty, this.note);
    parent.append(this.node);
    this.plot = null;
  }

  add(at, engine) {
    // Within one interval of the exporter the answer is the same, and so is its time.
    if (this.times.length && at <= this.times[this.times.length - 1]) return this.draw();
    this.times.push(at);
    this.plan.lines.forEach(([, , take], i) => this.raw[i].push(engine ? take(engine) : null));
    if (this.times.length > KEPT) {
      this.times.shift();
      this.raw.forEach((values) => values.shift());
    }
    if (!engine) return this.draw();
    const part = engine[this.plan.part];
    const now = part === null ? null : this.plan.now(engine);
    this.now.textContent = now ?? "";
    this.note.textContent = part !== null && this.plan.note ? this.plan.note(engine) : "";
    const why = part === null ? engine.no_data[this.plan.part] : now === null ? this.plan.why : null;
    this.empty.replaceChildren(...(why ? [noData(why)] : []));
    this.body.hidden = !this.raw.some((values) => values.some(known));
    return this.draw();
  }

  // Sums from the bottom up; a value that is missing breaks the whole stack at that time.
  data() {
    if (!this.plan.stacked) return [this.times, ...this.raw];
    const sums = [];
    this.raw.forEach((values, i) => {
      sums.push(values.map((value, t) => (i === 0 ? value : known(sums[i - 1][t]) ? sums[i - 1][t] + (value ?? 0) : null)));
    });
    return [this.times, ...sums.reverse()];
  }

  draw() {
    if (this.body.hidden) return;
    if (this.plot === null) this.plot = this.made();
    this.plot.setData(this.data());
  }

  made() {
    const lines = this.plan.stacked ? [...this.plan.lines.keys()].reverse() : [...this.plan.lines.keys()];
    const series = lines.map((i) => {
      const [label, colour, , text] = this.plan.lines[i];
      return {
        label,
        stroke: css(colour),
        fill: this.plan.stacked ? css(colour) : undefined,
        width: this.plan.stacked ? 0 : 2,
        points: { show: false },
        value: (_, __, ___, at) => {
          const value = this.raw[i][at ?? this.times.length - 1];
          return known(value) ? text(value) : "no data";
        },
      };
    });
    const quiet = css("quiet");
    const grid = { stroke: css("line"), width: 1 };
    return new uPlot({
      width: Math.max(this.node.clientWidth - 30, 200),
      height: CHART_PX,
      cursor: { y: false },
      scales: { y: { range: (_, low, high) => [0, this.plan.top ?? Math.max(high ?? 0, 1) * 1.05] } },
      axes: [
        { stroke: quiet, grid, ticks: grid },
        { stroke: quiet, grid, ticks: grid, size: 60, values: (_, splits) => splits.map(this.plan.axis) },
      ],
      series: [{}, ...series],
    }, this.data(), this.body);
  }

  resize() {
    if (this.plot) this.plot.setSize({ width: Math.max(this.node.clientWidth - 30, 200), height: CHART_PX });
  }

  restyle() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    this.draw();
  }
}

const engines = new Map();
const chartsOf = (name) => {
  if (!engines.has(name)) {
    const box = make("div");
    box.dataset.engine = name;
    box.append(make("h3", `Engine ${name}`));
    const grid = make("div", undefined, "grid");
    box.append(grid);
    document.getElementById("engines").append(box);
    engines.set(name, CHARTS.map((plan) => new Chart(plan, grid)));
  }
  return engines.get(name);
};

const fill = (id, ...nodes) => document.querySelector(`#${id} > div`).replaceChildren(...nodes);

function drawEngines(view) {
  for (const engine of view.engines) chartsOf(engine.engine).forEach((chart) => chart.add(view.at_s, engine));
  const here = new Set(view.engines.map((engine) => engine.engine));
  for (const [name, charts] of engines) {
    if (!here.has(name)) charts.forEach((chart) => chart.add(view.at_s, null));
  }
  let empty = document.getElementById("no-engines");
  if (empty) empty.remove();
  if (!view.engines.length) {
    empty = noData(view.no_data.engines);
    empty.id = "no-engines";
    document.getElementById("engines").prepend(empty);
  }
}

function drawHolds(view) {
  if (view.holds === null) return fill("holds", noData(view.no_data.holds));
  if (!view.holds.length) return fill("holds", make("div", "none: every block belongs to a live request", "none"));
  const rows = view.holds.map((hold) => [
    `engine ${hold.engine}, ${hold.cause}: ${whole(hold.blocks)} blocks`,
    `${hold.since_before ? "at least " : ""}${seconds(hold.for_s)}`,
  ]);
  return fill("holds", table(rows), make("p", "how long there have been some without a gap, as seen here", "note"));
}

function drawFindings(view) {
  if (view.findings === null) return fill("findings", noData(view.no_data.findings));
  const rows = Object.entries(view.findings).map(([reason, count]) => [reason, whole(count), "bad"]);
  return fill("findings", rows.length ? table(rows) : make("div", "none", "none"));
}

function drawCoverage(view) {
  const coverage = view.coverage;
  if (coverage === null) return fill("coverage", noData(view.no_data.coverage));
  const rows = [["rows audited", whole(coverage.rows_audited)]];
  for (const [check, count] of Object.entries(coverage.checks)) rows.push([`check ${check}`, whole(count)]);
  for (const [cause, count] of Object.entries(coverage.skipped)) rows.push([`skipped: ${cause}`, whole(count)]);
  for (const check of coverage.stalled) rows.push([`check ${check}`, "stalled", "bad"]);
  return fill("coverage", table(rows));
}

function drawCost(view) {
  const cost = view.cost;
  if (cost === null) return fill("cost", noData(view.no_data.cost));
  const rows = [["time in hooks, all processes", known(cost.share) ? percent(cost.share) : "one look tells no rate"]];
  rows.push(["since the start", seconds(cost.hook_s)]);
  for (const [hook, spent] of Object.entries(cost.hooks).slice(0, 5)) rows.push([hook, seconds(spent)]);
  for (const [hook, count] of Object.entries(cost.faults)) rows.push([`faults in ${hook}`, whole(count), "bad"]);
  for (const [cause, count] of Object.entries(cost.dropped)) rows.push([`records dropped: ${cause}`, whole(count), "bad"]);
  if (known(cost.snapshot_age_s)) rows.push(["oldest snapshot", seconds(cost.snapshot_age_s)]);
  return fill("cost", table(rows));
}

function say(state, text) {
  document.body.dataset.state = state;
  document.getElementById("state").textContent = text;
}

async function ask() {
  const answer = await fetch(document.body.dataset.view, { cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()).trim().slice(0, 300) || `status ${answer.status}`);
  return answer.json();
}

async function turn() {
  try {
    const view = await ask();
    document.getElementById("run").textContent = view.run_id ? `run ${view.run_id}` : "";
    drawEngines(view);
    drawHolds(view);
    drawFindings(view);
    drawCoverage(view);
    drawCost(view);
    const age = view.cost && view.cost.snapshot_age_s;
    const at = new Date(view.at_s * 1000).toLocaleTimeString();
    if (!view.engines.length) say("empty", `${at}, ${view.no_data.engines}`);
    else if (age > SILENT_S) say("quiet", `${at}, a process has published nothing for ${seconds(age)}: idle, or gone`);
    else say("live", `live, ${at}`);
  } catch (error) {
    for (const charts of engines.values()) charts.forEach((chart) => chart.add(Date.now() / 1000, null));
    say("failed", error instanceof TypeError ? "the exporter does not answer" : error.message);
  }
  setTimeout(turn, POLL_MS);
}

const everyChart = (act) => [...engines.values()].flat().forEach(act);
addEventListener("resize", () => everyChart((chart) => chart.resize()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => everyChart((chart) => chart.restyle()));
turn();

// The positions lab: the vectors that tell a model where a token stands, and what can be asked of them.
import { el, clear, debounce, segmented, slider } from "../dom.js";
import { figure, legend } from "../figure.js";
import { lineChart } from "../chart.js";
import { extentOf, innerContext, mapIn, signedNumber } from "../bits.js";

const POSITION_KINDS = [
  ["sinusoidal", "Sinusoidal"],
  ["learned", "Learned"],
  ["index", "Index"],
  ["fraction", "Fraction"],
];

const POSITION_FORMULAS = {
  sinusoidal: "Feature 2m is sin(i / base^(2m/D)), feature 2m+1 the cosine: clock hands, fast ones first.",
  learned: "A row of a table for each place, learned in training; here as it is before that, drawn at random.",
  index: "The bare number of the place, i, in the first feature.",
  fraction: "How much of the sentence has passed, i / (n − 1), in the first feature.",
};

export const positions = {
  id: "positions",
  title: "Positions",
  about: "Attention sees its words as a set. What is added to a word to say where it stands, and what makes a good one.",
  needs: () => true,
  async render(root, context) {
    const { state } = context;
    const learned = context.trace?.header.model.positions === "learned";
    const ownTable = () => learned && state.get("positions") === "learned";
    const controls = positionControls(state, ownTable);
    const settings = () => ({
      kind: state.get("positions", "sinusoidal"),
      length: Number(state.get("places", "48")),
      width: Number(state.get("features", "32")),
      base: 10 ** Number(state.get("base", "4")),
      ...(ownTable() ? { run: context.request.run, step: context.request.step } : {}),
    });
    const body = el("div", { class: "stack" });
    root.append(controls.element, body);

    let asked = 0;
    let pictures = innerContext(context);
    async function draw() {
      const turn = (asked += 1);
      try {
        const chosen = settings();
        const answer = await context.source.positions(chosen, context.signal);
        const others = await otherPositions(context, chosen);
        if (turn !== asked) return;
        pictures.end();
        pictures = innerContext(context);
        showPositions(body, pictures.context, chosen, answer, others);
      } catch (error) {
        if (!context.signal.aborted) context.failed(error);
      }
    }

    const later = debounce(draw, 120);
    const stop = state.subscribe((changed) => {
      if (!["positions", "places", "features", "base"].some((name) => changed.has(name))) return;
      controls.refresh();
      later();
    });
    await draw();
    return stop;
  },
};

/** The controls; those that do not touch the kind at hand are put away. */
function positionControls(state, ownTable) {
  const set = (name) => (value) => state.set({ [name]: value });
  const power = (value) => Math.round(10 ** value).toLocaleString("en");
  const sizes = { min: 4, max: 128 };
  const features = slider("Features", { ...sizes, step: 2, value: Number(state.get("features", "32")) }, set("features"));
  const base = slider("Base", { min: 1, max: 6, step: 0.5, value: Number(state.get("base", "4")), format: power }, set("base"));
  const element = el("div", { class: "controls" },
    segmented("Kind", POSITION_KINDS, state.get("positions", "sinusoidal"), set("positions")),
    slider("Places", { ...sizes, value: Number(state.get("places", "48")) }, set("places")),
    features, base);
  function refresh() {
    base.hidden = state.get("positions", "sinusoidal") !== "sinusoidal";
    features.hidden = ownTable();
  }
  refresh();
  return { element, refresh };
}

function showPositions(body, context, chosen, answer, others) {
  clear(body);
  const values = Float32Array.from(answer.array.flat());
  const extent = extentOf(values);
  const title = chosen.run ? `learned positions of ${chosen.run}` : `${chosen.kind} positions`;
  const map = mapIn(context, {
    rows: answer.array.map((_, place) => String(place)),
    columns: answer.array[0].map((_, feature) => String(feature)),
    values, extent, colours: "signed", digits: 2, maxCell: 18,
    name: title, corner: "place, feature →", legend: "value",
    label: (r, c, value) => `place ${r}, feature ${c}: ${signedNumber(value)}`,
  });
  const picture = figure(context, {
    title: `Vectors of ${answer.array.length} places`,
    note: chosen.run ? `The table that ${chosen.run} has learned, a row for each place.` : POSITION_FORMULAS[chosen.kind],
    trace: null,
    picture: map.element,
    legend: legend({ scale: "signed", label: "value", low: signedNumber(-extent), high: signedNumber(extent) }),
    table: () => map.table(),
    svg: () => map.svg(title),
    name: `positions-${chosen.kind}`,
  });
  const curve = lineChart(context, {
    trace: null,
    title: "Dot product against offset",
    note: "The line is the mean over all pairs of places so far apart, the band their deviation: "
      + "where there is no band, only the distance counts.",
    x: { label: "places apart", values: answer.dot.map((_, offset) => offset) },
    y: { label: "dot product" },
    series: [{
      name: "mean dot product",
      values: answer.dot,
      low: answer.dot.map((mean, offset) => mean - answer.spread[offset]),
      high: answer.dot.map((mean, offset) => mean + answer.spread[offset]),
    }],
    name: `dot-products-${chosen.kind}`,
  });
  body.append(
    el("div", { class: "columns" },
      picture, el("div", { class: "stack" }, curve, positionCriteria(answer.criteria), positionTable(chosen, others))),
  );
  const met = answer.criteria.filter((one) => one.holds).map((one) => one.name);
  context.announce(`${chosen.kind}: ${met.length} of ${answer.criteria.length} criteria met, ${met.join(", ")}`);
}

function positionCriteria(criteria) {
  const list = el("ul", { class: "criteria", aria: { label: "The four criteria" } });
  for (const { name, holds, value, why } of criteria) {
    list.append(
      el("li", { class: holds ? "card criterion holds" : "card criterion fails", data: { criterion: name } },
        el("span", { class: "verdict", text: holds ? "✓ yes" : "✗ no" }),
        el("strong", { text: name }),
        el("span", { class: "num", data: { value }, text: positionValue(value) }),
        el("p", { class: "quiet", text: why })),
    );
  }
  return list;
}

function positionValue(value) {
  return Math.abs(value) >= 1000 || (value !== 0 && Math.abs(value) < 0.001) ? value.toExponential(1) : value.toFixed(3);
}

/** What all kinds come to at these settings, in their order. */
function otherPositions(context, { length, width, base }) {
  const ask = ([kind]) => context.source.positions({ kind, length, width, base }, context.signal);
  return Promise.all(POSITION_KINDS.map(ask));
}

/** All four kinds by all four criteria. */
function positionTable(chosen, answers) {
  const names = answers[0].criteria.map((one) => one.name);
  const head = el("tr", {}, el("th", { scope: "col", text: "kind" }), names.map((text) => el("th", { scope: "col", text })));
  const verdict = ({ holds }) => el("td", { class: holds ? "holds" : "fails", text: holds ? "✓ yes" : "✗ no" });
  const rows = POSITION_KINDS.map(([kind, label], i) =>
    el("tr", { class: kind === chosen.kind ? "chosen" : "" },
      el("th", { scope: "row", text: label }), answers[i].criteria.map(verdict)));
  const table = el("table", { class: "plain" },
    el("caption", { text: "All kinds, computed at these settings" }), el("thead", {}, head), el("tbody", {}, rows));
  return el("div", { class: "card" },
    el("div", { class: "scroller", tabIndex: 0, role: "region", aria: { label: "All kinds by all criteria" } }, table));
}

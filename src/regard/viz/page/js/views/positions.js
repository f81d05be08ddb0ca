// Position encodings: their vectors, and how well they meet four criteria.
import { clear, debounce, el, segmented, slider } from "../dom.js";
import { lineChart } from "../chart.js";
import { innerContext, mapFigure, mapIn, signedLegend, tableOf } from "../figure.js";
import { extentOf, signedNumber, thousands } from "../numbers.js";
import { anyOf } from "../state.js";

const POSITION_KINDS = [
  ["sinusoidal", "Sinusoidal"],
  ["learned", "Learned"],
  ["index", "Index"],
  ["fraction", "Fraction"],
];

const POSITION_FORMULAS = {
  sinusoidal: "Feature 2m is sin(i / base^(2m/D)) and feature 2m+1 the cosine, with falling frequencies.",
  learned: "One row of a table per position, learned in training; shown here before training, drawn at random.",
  index: "The index of the position, i, in the first feature.",
  fraction: "The fraction of the sentence before the position, i / (n − 1), in the first feature.",
};

export const positions = {
  id: "positions",
  title: "Positions",
  about: "Attention treats its inputs as a set; a position encoding, added to the embeddings, tells their order.",
  needs: () => true,
  async render(root, context) {
    const { state } = context;
    const learned = context.trace?.header.model.positions === "learned";
    const ownTable = () => learned && state.get("positions") === "learned";
    const controls = positionControls(state, ownTable);
    const settings = () => ({
      kind: state.get("positions", "sinusoidal"),
      length: Number(state.get("length", "48")),
      width: Number(state.get("features", "32")),
      base: 10 ** Number(state.get("base", "4")),
      ...(ownTable() ? { run: context.request.run, step: context.request.step } : {}),
    });
    const body = el("div", { class: "stack" });
    root.append(controls.element, body);

    let draws = 0;
    let pictures = innerContext(context);
    async function draw() {
      const mine = (draws += 1);
      try {
        const chosen = settings();
        const answer = await context.source.positions(chosen, context.signal);
        const others = await allKinds(context, chosen);
        if (mine !== draws) return;
        pictures.end();
        pictures = innerContext(context);
        showPositions(body, pictures.context, chosen, answer, others);
      } catch (error) {
        if (!context.signal.aborted) context.failed(error);
      }
    }

    const drawSoon = debounce(draw, 120);
    const stop = state.subscribe((changed) => {
      if (!anyOf(changed, "positions", "length", "features", "base")) return;
      controls.refresh();
      drawSoon();
    });
    await draw();
    return stop;
  },
};

/** The controls; those without effect on the chosen kind are hidden. */
function positionControls(state, ownTable) {
  const set = (name) => (value) => state.set({ [name]: value });
  const value = (name, fallback) => Number(state.get(name, fallback));
  const sizes = { min: 4, max: 128 };
  const powers = { min: 1, max: 6, step: 0.5, format: (power) => thousands(Math.round(10 ** power)) };
  const length = slider("Positions", { ...sizes, value: value("length", "48") }, set("length"));
  const features = slider("Features", { ...sizes, step: 2, value: value("features", "32") }, set("features"));
  const base = slider("Base", { ...powers, value: value("base", "4") }, set("base"));
  const kind = segmented("Kind", POSITION_KINDS, state.get("positions", "sinusoidal"), set("positions"));
  function refresh() {
    base.hidden = state.get("positions", "sinusoidal") !== "sinusoidal";
    features.hidden = ownTable();
  }
  refresh();
  return { element: el("div", { class: "controls" }, kind, length, features, base), refresh };
}

function showPositions(body, context, chosen, answer, others) {
  clear(body);
  const values = Float32Array.from(answer.array.flat());
  const extent = extentOf(values);
  const title = chosen.run ? `learned positions of ${chosen.run}` : `${chosen.kind} positions`;
  const map = mapIn(context, {
    rows: answer.array.map((_, position) => String(position)),
    columns: answer.array[0].map((_, feature) => String(feature)),
    values,
    extent,
    colours: "signed",
    maxCell: 18,
    name: title,
    corner: "feature →",
    legend: "value",
    label: (r, c, value) => `position ${r}, feature ${c}: ${signedNumber(value)}`,
  });
  const picture = mapFigure(context, map, {
    title: `Vectors of ${answer.array.length} positions`,
    note: chosen.run ? `The table that ${chosen.run} has learned, one row per position.` : POSITION_FORMULAS[chosen.kind],
    trace: null,
    legend: signedLegend("value", extent),
    svgTitle: () => title,
    name: `positions-${chosen.kind}`,
  });
  const curve = lineChart(context, {
    trace: null,
    title: "Dot product by distance",
    note:
      "The line is the mean over all pairs of positions at this distance, the band the standard deviation. " +
      "Without a band, only the distance matters.",
    x: { label: "distance", values: answer.dot.map((_, distance) => distance) },
    y: { label: "dot product" },
    series: [
      {
        name: "mean dot product",
        values: answer.dot,
        low: answer.dot.map((mean, distance) => mean - answer.spread[distance]),
        high: answer.dot.map((mean, distance) => mean + answer.spread[distance]),
      },
    ],
    name: `dot-products-${chosen.kind}`,
  });
  const aside = el("div", { class: "stack" }, curve, criteriaList(answer.criteria), criteriaTable(others));
  body.append(el("div", { class: "columns" }, picture, aside));
  const met = answer.criteria.filter((one) => one.holds).map((one) => one.name);
  context.announce(`${chosen.kind}: ${met.length} of ${answer.criteria.length} criteria met, ${met.join(", ")}`);
}

const verdictText = (holds) => (holds ? "✓ yes" : "✗ no");

function criteriaList(criteria) {
  const items = criteria.map(({ name, holds, value, why }) =>
    el(
      "li",
      { class: `card criterion ${holds ? "holds" : "fails"}`, data: { criterion: name } },
      el("span", { class: "verdict", text: verdictText(holds) }),
      el("strong", { text: name }),
      el("span", { class: "num", data: { value }, text: criterionValue(value) }),
      el("p", { class: "quiet", text: why }),
    ),
  );
  return el("ul", { class: "criteria", aria: { label: "Four criteria" } }, items);
}

function criterionValue(value) {
  return Math.abs(value) >= 1000 || (value !== 0 && Math.abs(value) < 0.001) ? value.toExponential(1) : value.toFixed(3);
}

/** The answers for all kinds at these settings, in their order. */
function allKinds(context, { length, width, base }) {
  const ask = ([kind]) => context.source.positions({ kind, length, width, base }, context.signal);
  return Promise.all(POSITION_KINDS.map(ask));
}

/** All kinds by all criteria. */
function criteriaTable(answers) {
  return tableOf({
    caption: "All kinds at these settings",
    columns: ["kind", ...answers[0].criteria.map((one) => one.name)],
    rows: POSITION_KINDS.map(([, label], i) => [label, ...answers[i].criteria.map((one) => verdictText(one.holds))]),
  });
}

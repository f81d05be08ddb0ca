// Explanations: which words the output depended on, with the model as a black box; and people as black boxes.
import { button, clear, el, field, segmented, select } from "../dom.js";
import { barFigure, extentOf, innerContext, mapIn, signedNumber } from "../bits.js";
import { OKABE } from "../colours.js";
import { figure, legend } from "../figure.js";
import { judgePanel } from "../judge.js";
import { lineChart } from "../chart.js";
import { entryWeights, meanEntry } from "../maps.js";
import { mergeWords, sides, tokenLabels, visible } from "../tokens.js";

const MASKS = [64, 128, 256, 512, 1000, 2000, 4000];
const ORDER_NAMES = { explanation: "explanation", attention: "attention", random: "random order" };

export const explain = {
  id: "explain",
  title: "Explain",
  about: "Which words mattered: some are hidden, again and again, and the output is scored each time.",
  lacking: "There is no output to explain yet: type a text above.",
  needs: (header) => header !== null && header.output.p.length > 0,
  async render(root, context) {
    const bar = el("progress", { max: 1, value: 0, hidden: true, aria: { label: "Masks asked" } });
    const said = el("p", { class: "quiet num explain-status" });
    const found = el("div", { class: "stack" });
    const looked = el("div");
    const body = el("div", { class: "columns" }, found, looked);
    const below = el("div", { class: "stack" });
    const again = button("Ask the model", () => (asking ? asking.abort() : ask()), { class: "main" });
    const tested = el("span", { class: "tested" }); // which orders the curves compare, once they are there
    const maps = {};
    let asking = null;
    let [pictures, looking] = [innerContext(context), innerContext(context)];

    root.append(
      el("p", { class: "callout" },
        el("strong", { text: "Attention is not by itself an explanation. " }),
        "It says where a model looked, not what its answer hung on. Here words are hidden at random and the output is "
          + "scored each time.", tested, " Even so, this tells what the output depended on while words were hidden, not "
          + "what the model thought."),
      explainControls(context.state, again), bar, said, body, below);
    if (context.source.live) root.append(judgePanel(context));

    async function look() {
      looking.end();
      looking = innerContext(context);
      maps.attention = await showLooked(looked, looking.context, (place) => maps.importance?.mark(place));
    }

    async function ask() {
      const own = (asking = new AbortController());
      const stop = () => own.abort();
      context.signal.addEventListener("abort", stop);
      again.textContent = "Stop";
      pictures.end();
      pictures = innerContext(context);
      maps.importance = importanceFigure(pictures.context, (place) => maps.attention?.mark(place));
      bar.hidden = found.hidden = false;
      let named = {};
      try {
        await context.source.explain(explainRequest(context), (line) => {
          if (own.signal.aborted) return;
          if (line.of) {
            bar.value = line.done / line.of;
            said.textContent = `${line.done} of ${line.of} masks asked${line.done < line.of ? "" : "; now the curves"}`;
          }
          if (line.inputs) named = { inputs: line.inputs, outputs: line.outputs }; // the first line says what is asked
          if (line.importance) maps.importance.show(found, { ...named, ...line });
          if (line.final) {
            showOverall(below, pictures.context, line);
            tested.textContent = line.curves.deletion.attention
              ? " The curves below put both to the same test."
              : " This model's attention gives no order of the words, so the curves below test the explanation alone.";
            said.textContent = explainSummary(line);
            context.announce(explainSummary(line));
          }
        }, own.signal);
      } catch (error) {
        if (asking !== own) return; // another question has taken its place
        if (own.signal.aborted) said.textContent = "Stopped; what was found so far is shown.";
        else said.textContent = error.message;
        found.hidden = !found.firstChild; // the attention has the room to itself
      } finally {
        context.signal.removeEventListener("abort", stop);
        if (asking === own) {
          asking = null;
          again.textContent = "Ask again";
          bar.hidden = true;
        }
      }
    }

    const unsubscribe = context.state.subscribe((changed) => {
      if (!["masks", "seed", "unit", "how"].some((name) => changed.has(name))) return;
      if (changed.has("unit")) look();
      asking?.abort();
      ask();
    });
    await look();
    ask(); // goes on by itself, and ends with the view
    return () => {
      unsubscribe();
      asking?.abort();
    };
  },
};

function explainRequest({ state, request }) {
  return {
    run: request.run,
    step: request.step,
    text: request.text,
    target: request.target ?? null,
    masks: Number(state.get("masks", "256")),
    keep: 0.5,
    seed: Number(state.get("seed", "0")),
    unit: state.get("unit", "words"),
    how: state.get("how", "unknown"),
  };
}

function explainControls(state, again) {
  const seed = el("input", { type: "number", min: 0, step: 1, value: state.get("seed", "0"), class: "short" });
  seed.addEventListener("change", () => state.set({ seed: Math.max(0, Math.floor(Number(seed.value)) || 0) }));
  return el("div", { class: "controls" },
    field("Maximum number of masks", select(MASKS.map((n) => [n, String(n)]), state.get("masks", "256"), (n) => state.set({ masks: n }))),
    field("Seed", seed),
    segmented("Hide", [["words", "words"], ["pieces", "pieces"]], state.get("unit", "words"), (unit) => state.set({ unit })),
    segmented("How", [["unknown", "as unknown"], ["drop", "left out"]], state.get("how", "unknown"), (how) => state.set({ how })),
    again);
}

function explainSummary(line) {
  const order = line.overall.map((_, i) => i).sort((a, b) => line.overall[b] - line.overall[a]);
  const first = order.slice(0, 3).map((i) => `${visible(line.inputs[i])} ${signedNumber(line.overall[i])}`).join(", ");
  const sure = line.exact ? "every mask, so no error" : "with standard errors";
  return `${line.calls} calls, ${sure}. What mattered most: ${first}`;
}

/** Outputs down the left, inputs along the top, blue where an input speaks for an output; `show` takes each new line. */
function importanceFigure(context, onFocus) {
  const scale = el("div");
  let [map, shown, given] = [null, null, null];

  function described(line) {
    const [inputs, outputs] = [line.inputs.map(visible), line.outputs.map(visible)];
    const values = new Float32Array(inputs.length * outputs.length);
    line.importance.forEach((row, i) => row.forEach((value, o) => (values[o * inputs.length + i] = value)));
    const error = (o, i) => (line.exact ? "" : ` ± ${line.error[i][o].toFixed(2)}`);
    return {
      rows: outputs, columns: inputs, values, extent: extentOf(values), colours: "signed", digits: 2,
      name: "Importance of each input for each output", corner: "depends on →", legend: "importance",
      label: (r, c, value) => `${outputs[r]} depends on ${inputs[c]}: ${signedNumber(value)}${error(r, c)}`,
      onFocus, error,
    };
  }

  return {
    mark(place) {
      const inside = place && place.r < given?.rows.length && place.c < given?.columns.length;
      map?.mark(inside ? place : null);
    },
    show(place, line) {
      given = described(line);
      if (map) map.update(given);
      else map = mapIn(context, given);
      const [low, high] = [signedNumber(-given.extent), signedNumber(given.extent)];
      clear(scale).append(legend({ scale: "signed", label: "change in log-probability", low, high }));
      shown ??= figure(context, {
        title: "What each output depended on",
        picture: map.element,
        legend: scale,
        table: () => importanceTable(given),
        svg: () => map.svg("What each output depended on"),
        name: "importance",
      });
      shown.retitle("What each output depended on", importanceNote(line));
      shown.refresh();
      if (!shown.isConnected) clear(place).append(shown);
    },
  };
}

function importanceTable({ rows, columns, values, error }) {
  return {
    caption: "Importance ± standard error",
    columns: ["output", ...columns],
    rows: rows.map((output, o) => [
      output,
      ...columns.map((_, i) => `${signedNumber(values[o * columns.length + i])}${error(o, i)}`),
    ]),
  };
}

function importanceNote(line) {
  if (!line.final) return "Still asking; the numbers will settle.";
  return line.exact ? "Exact: every mask was asked." : "Each number has a standard error: point at it, or see the table.";
}

/** Of a model that goes on with its prompt: what it wrote, by where it looked in the prompt when it wrote it. */
function ofPrompt({ target, inputs }, weights) {
  const rows = target.map((_, i) => i).filter((i) => !target[i].given);
  const keys = inputs.filter((token) => token.given);
  const kept = rows.map((row) => weights.subarray(row * inputs.length, row * inputs.length + keys.length));
  return { queries: rows.map((row) => target[row]), keys, weights: Float32Array.from(kept.flatMap((row) => [...row])) };
}

/** The attention beside it: mean of all layers and heads, on words where words are hidden. */
async function showLooked(place, context, onFocus) {
  const { header } = context.trace;
  const part = ["cross", "decoder", "encoder"].find((one) => header.attention.some((entry) => entry.part === one));
  const entries = header.attention.filter((entry) => entry.part === part);
  if (!entries.length) {
    clear(place).append(el("p", { class: "quiet", text: "This model does not attend, so there is no attention to compare with." }));
    return null;
  }
  const { values: mean } = await entryWeights(context.trace, meanEntry(header, part), "mean");
  const { queries, keys, weights } = part === "decoder"
    ? ofPrompt(header.tokens, mean)
    : { ...sides(header, entries[0]), weights: mean };
  const merged = context.state.get("unit", "words") === "words"
    ? mergeWords(queries, keys, weights)
    : { queries: tokenLabels(queries), keys: tokenLabels(keys), weights };
  const marks = keys.findIndex((token) => !token.mark); // columns before the first word: marks are never hidden
  const moved = (at, by) => at && { ...at, c: at.c < 0 ? at.c : Math.max(at.c + by, 0) };
  const map = mapIn(context, {
    rows: merged.queries, columns: merged.keys, values: merged.weights, colours: "weight", digits: 2,
    name: "Attention, mean of all heads", corner: "looks at →",
    onFocus: (at) => onFocus(moved(at, -marks)),
  });
  const title = `Where it looked: ${part === "cross" ? "cross-attention" : `${part} attention`}, mean of all heads`;
  clear(place).append(figure(context, {
    title,
    note: "Not by itself an explanation: compare with the picture beside it.",
    picture: map.element,
    legend: legend({ scale: "weight", label: "attention", low: "0", high: "1" }),
    table: () => map.table(),
    svg: () => map.svg(title),
    name: "attention",
  }));
  return { mark: (at) => map.mark(moved(at, marks)) };
}

function showOverall(place, context, line) {
  const rows = line.inputs.map((label, i) => ({
    label: visible(label),
    value: line.overall[i],
    error: line.exact ? 0 : 2 * line.overall_error[i],
    said: line.exact ? signedNumber(line.overall[i]) : `${signedNumber(line.overall[i])} ± ${line.overall_error[i].toFixed(2)}`,
  }));
  clear(place).append(barFigure(context, {
    title: "What the whole output depended on",
    note: `Change in log-probability. With nothing hidden it is ${signedNumber(line.whole)}, with everything hidden `
      + `${signedNumber(line.nothing)}.`
      + (line.exact ? "" : " Lines: two standard errors either way."),
    rows,
    columns: ["input", "importance", "standard error"],
    cells: (row, i) => [row.label, signedNumber(row.value), line.overall_error[i].toFixed(3)],
    name: "overall",
  }));
  const curves = ["deletion", "insertion"].map((kind) => explainCurve(context, line, kind));
  place.append(el("div", { class: "columns" }, curves));
}

function explainCurve(context, line, kind) {
  const curves = line.curves[kind];
  const parts = line.inputs.length;
  const areas = line.curves.areas[kind];
  const orders = Object.keys(ORDER_NAMES).filter((name) => curves[name]);
  const deletion = kind === "deletion";
  const under = orders.map((name) => `${ORDER_NAMES[name]} ${signedNumber(areas[name])}`).join(", ");
  return lineChart(context, {
    title: deletion ? "Deletion: the most important hidden first" : "Insertion: the most important shown first",
    note: `The faster it ${deletion ? "falls" : "rises"}, the better the order. Area under the curve: ${under}.`,
    x: { label: deletion ? "words hidden" : "words shown", values: Array.from({ length: parts + 1 }, (_, i) => i) },
    y: { label: "log-probability" },
    series: orders.map((name) => ({
      name: ORDER_NAMES[name], values: curves[name], dashed: name === "random",
      colour: OKABE[Object.keys(ORDER_NAMES).indexOf(name)],
    })),
    name: kind,
  });
}

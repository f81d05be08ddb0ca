// Explanations: the importance of each input for each output, estimated by random masking (RISE).
import { button, clear, el, field, segmented, select } from "../dom.js";
import { entryWeights, meanEntry } from "../attention_map.js";
import { barFigure } from "../bars.js";
import { lineChart } from "../chart.js";
import { OKABE } from "../colours.js";
import { PICTURED, imageAddress, picture } from "../element_picture.js";
import { figure, innerContext, legend, mapFigure, mapIn, signedLegend } from "../figure.js";
import { extentOf, signedNumber, topIndices } from "../numbers.js";
import { anyOf } from "../state.js";
import { svgCard, svgDocument, svgElement, svgGroup, svgPalette, svgText } from "../svg.js";
import { mergeWords, sides, tokenLabels, visible } from "../tokens.js";

const MAX_CLASSES = 3; // with a map of their own
const MASKS = [64, 128, 256, 512, 1000, 2000, 4000];
const ORDER_NAMES = { explanation: "explanation", attention: "attention", gradient: "gradient", random: "random order" };

const picturedSide = (header) => Object.values(header.axes).find((axis) => PICTURED.includes(axis.kind));
const isImage = (header) => header.model.task === "predict" && header.axes.source.kind === "patches";

export const explain = {
  id: "explain",
  title: "Explain",
  about: "Which inputs mattered: random inputs are masked, many times, and the output is scored each time (RISE).",
  lacking: "Texts and the classes of images are explained here; of other inputs, hide parts in Interventions.",
  needs: (header) => header !== null && header.output.p.length > 0 && (!picturedSide(header) || isImage(header)),
  async render(root, context) {
    const bar = el("progress", { max: 1, value: 0, hidden: true, aria: { label: "Masks evaluated" } });
    const status = el("p", { class: "quiet num explain-status" });
    const importance = el("div", { class: "stack" });
    const attention = el("div");
    const body = el("div", { class: "columns" }, importance, attention);
    const below = el("div", { class: "stack" });
    const runButton = button("Run", () => (running ? running.abort() : run()), { class: "main" });
    const comparison = el("span", { class: "comparison" }); // which orders the curves compare
    const maps = {};
    const image = isImage(context.trace.header) ? await context.trace.array("axes.source.image") : null;
    let running = null;
    let [pictures, attentionPicture] = [innerContext(context), innerContext(context)];

    root.append(
      el(
        "p",
        { class: "callout" },
        el("strong", { text: "Attention is not by itself an explanation. " }),
        "It shows where a model looked, not what its output depended on. Here random inputs are masked and the output " +
          "is scored each time.",
        comparison,
        " The result describes how the output depends on masked inputs, not how the model reasons.",
      ),
      explainControls(context, runButton),
      bar,
      status,
      body,
      below,
    );

    async function showAttention() {
      attentionPicture.end();
      attentionPicture = innerContext(context);
      const onFocus = (point) => maps.importance?.mark(point);
      attention.hidden = Boolean(image); // the view On the input shows it
      maps.attention = image ? null : await attentionFigure(attention, attentionPicture.context, onFocus);
    }

    function showLine(line, named) {
      if (line.of) {
        bar.value = line.done / line.of;
        status.textContent = `${line.done} of ${line.of} masks evaluated${line.done < line.of ? "" : "; computing the curves"}`;
      }
      if (line.inputs) {
        const { inputs, outputs, output, what, grid } = line; // in the first line
        Object.assign(named, { inputs, outputs, output, what, grid });
      }
      if (line.importance) maps.importance.show(importance, { ...named, ...line });
      if (line.final) {
        showOverall(below, pictures.context, line);
        comparison.textContent = line.curves.deletion.attention
          ? " The curves below compare both by the same test."
          : " The attention of this model gives no order of the inputs, so the curves below test the explanation alone.";
        status.textContent = resultText(line);
        context.announce(resultText(line));
      }
    }

    async function run() {
      const own = (running = new AbortController());
      const stop = () => own.abort();
      context.signal.addEventListener("abort", stop);
      runButton.textContent = "Stop";
      pictures.end();
      pictures = innerContext(context);
      const focused = (point) => maps.attention?.mark?.(point);
      maps.importance = image ? pixelFigure(pictures.context, image) : importanceFigure(pictures.context, focused);
      bar.hidden = importance.hidden = false;
      const named = {};
      const onLine = (line) => own.signal.aborted || showLine(line, named);
      try {
        await context.source.explain(explainRequest(context), onLine, own.signal);
      } catch (error) {
        if (running !== own) return; // replaced by a newer request
        status.textContent = own.signal.aborted ? "Stopped; the result so far is shown." : error.message;
        importance.hidden = !importance.firstChild;
      } finally {
        context.signal.removeEventListener("abort", stop);
        if (running === own) {
          running = null;
          runButton.textContent = "Run again";
          bar.hidden = true;
        }
      }
    }

    const unsubscribe = context.state.subscribe((changed) => {
      if (!anyOf(changed, "masks", "seed", "unit", "how")) return;
      if (changed.has("unit")) showAttention();
      running?.abort();
      run();
    });
    await showAttention();
    run(); // not awaited: it continues in the background
    return () => {
      unsubscribe();
      running?.abort();
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

function explainControls({ state, trace }, runButton) {
  const seed = el("input", { type: "number", min: 0, step: 1, value: state.get("seed", "0"), class: "short" });
  seed.addEventListener("change", () => state.set({ seed: Math.max(0, Math.floor(Number(seed.value)) || 0) }));
  const counts = MASKS.map((n) => [n, String(n)]);
  const ofText = !isImage(trace.header);
  const units = [["words", "words"], ["tokens", "subwords"]];
  const methods = [["unknown", "unknown token"], ["drop", "nothing"]];
  return el(
    "div",
    { class: "controls" },
    field("Maximum number of masks", select(counts, state.get("masks", "256"), (masks) => state.set({ masks }))),
    field("Seed", seed),
    ofText && segmented("Mask", units, state.get("unit", "words"), (unit) => state.set({ unit })),
    ofText && segmented("Replace by", methods, state.get("how", "unknown"), (how) => state.set({ how })),
    runButton,
  );
}

function resultText(line) {
  if (line.grid) {
    const [best] = topIndices(line.overall, 1);
    return `${line.calls} model calls. Most important pixel: ${line.inputs[best]} (row, column), ${signedNumber(line.overall[best])}`;
  }
  const top = topIndices(line.overall, 3).map((i) => `${visible(line.inputs[i])} ${signedNumber(line.overall[i])}`);
  const precision = line.exact ? "all masks, so exact" : "with standard errors";
  return `${line.calls} model calls, ${precision}. Most important: ${top.join(", ")}`;
}

/** The image, then the same under the importance of its pixels for the most probable classes. */
function pixelFigure(context, image) {
  const title = "Importance of each pixel for each class";
  const [body, scale] = [el("div", { class: "element-picture" }), el("div")];
  const [height, width] = image.shape;
  const [side, gap] = [220, 20];
  let [box, shown] = [null, null];

  function drawn() {
    const size = side / Math.max(height, width);
    const column = (k, name, href) => [
      picture(k * (side + gap), 0, width * size, height * size, href),
      svgText(k * (side + gap), height * size + 18, name, { fill: svgPalette().ink, "font-size": 13 }),
    ];
    const maps = shown.classes.map(([name, values], k) =>
      column(k + 1, name, imageAddress(image, null, values.map((value) => value / shown.extent), "signed")),
    );
    const parts = [...column(0, "the image", imageAddress(image)), ...maps.flat()];
    return { width: (maps.length + 1) * (side + gap), height: height * size + 30, parts };
  }

  const valuesOf = (line, o) => Float32Array.from(line.importance, (row) => row[o]);
  const svg = () => {
    const { width: wide, height: high, parts } = drawn();
    const card = svgCard(wide + 56, high + 94, title);
    return svgDocument(wide + 56, high + 94, title, [...card, svgGroup({ transform: "translate(28 66)" }, parts)]);
  };
  const places = (values) => topIndices(values, 5).map((i) => `${Math.floor(i / width) + 1},${(i % width) + 1} ${signedNumber(values[i])}`);

  return {
    show(container, line) {
      const order = [line.output, ...line.outputs.filter((name) => name !== line.output)].slice(0, MAX_CLASSES);
      const classes = order.map((name) => [name, valuesOf(line, line.outputs.indexOf(name))]);
      shown = { classes, extent: Math.max(...classes.map(([, values]) => extentOf(values))) };
      const { width: wide, height: high, parts } = drawn();
      clear(body).append(svgElement(wide, high, title, parts));
      clear(scale).append(signedLegend("change in the probability of the class", shown.extent));
      const table = () => ({
        caption: "The most important pixels (row, column)",
        columns: ["class", "1", "2", "3", "4", "5"],
        rows: shown.classes.map(([name, values]) => [name, ...places(values)]),
      });
      box ??= figure(context, { title, note: "", picture: body, legend: scale, table, svg, name: "importance" });
      box.retitle(title, line.final ? "Blue pixels raise the probability where they are shown, vermilion ones lower it." : "Running; the values will settle.");
      box.refresh();
      if (!box.isConnected) clear(container).append(box);
    },
  };
}

/** Outputs by inputs, blue where an input raises the probability of an output; `show` takes each new line. */
function importanceFigure(context, onFocus) {
  const title = "Importance of each input for each output";
  const scale = el("div");
  let [map, box, settings] = [null, null, null];

  function settingsOf(line) {
    const [inputs, outputs] = [line.inputs.map(visible), line.outputs.map(visible)];
    const values = new Float32Array(inputs.length * outputs.length);
    line.importance.forEach((row, i) => row.forEach((value, o) => (values[o * inputs.length + i] = value)));
    const error = (o, i) => (line.exact ? "" : ` ± ${line.error[i][o].toFixed(2)}`);
    return {
      rows: outputs,
      columns: inputs,
      values,
      extent: extentOf(values),
      colours: "signed",
      name: title,
      corner: "depends on →",
      legend: "importance",
      label: (r, c, value) => `${outputs[r]} depends on ${inputs[c]}: ${signedNumber(value)}${error(r, c)}`,
      onFocus,
      error,
    };
  }

  return {
    mark(point) {
      const inside = point && point.r < settings?.rows.length && point.c < settings?.columns.length;
      map?.mark(inside ? point : null);
    },
    show(container, line) {
      settings = settingsOf(line);
      if (map) map.update(settings);
      else map = mapIn(context, settings);
      clear(scale).append(signedLegend("change in log-probability", settings.extent));
      const table = () => importanceTable(settings);
      box ??= mapFigure(context, map, { title, legend: scale, table, svgTitle: () => title, name: "importance" });
      box.retitle(title, importanceNote(line));
      box.refresh();
      if (!box.isConnected) clear(container).append(box);
    },
  };
}

function importanceTable({ rows, columns, values, error }) {
  const cell = (o, i) => `${signedNumber(values[o * columns.length + i])}${error(o, i)}`;
  return {
    caption: "Importance ± standard error",
    columns: ["output", ...columns],
    rows: rows.map((output, o) => [output, ...columns.map((_, i) => cell(o, i))]),
  };
}

function importanceNote(line) {
  if (!line.final) return "Running; the values will settle.";
  return line.exact ? "Exact: all masks were evaluated." : "Every value has a standard error: point at it, or see the table.";
}

/** For decoder-only models: the attention of generated tokens to the prompt. */
function attentionToPrompt(axes, weights) {
  const [target, inputs] = [axes.target.elements, axes.inputs.elements];
  const rows = target.map((_, i) => i).filter((i) => !target[i].given);
  const keys = inputs.filter((token) => token.given);
  const kept = rows.map((row) => weights.subarray(row * inputs.length, row * inputs.length + keys.length));
  return { queries: rows.map((row) => target[row]), keys, weights: Float32Array.from(kept.flatMap((row) => [...row])) };
}

/** The attention beside it: mean of all layers and heads, on words where words are masked. */
async function attentionFigure(container, context, onFocus) {
  const { header } = context.trace;
  const part = ["cross", "decoder", "encoder"].find((one) => header.attention.some((entry) => entry.part === one));
  if (!part) {
    const text = "This model has no attention to compare with.";
    clear(container).append(el("p", { class: "quiet", text }));
    return null;
  }
  const entry = meanEntry(header, part);
  const { values: mean } = await entryWeights(context.trace, entry, "mean");
  const { queries, keys, weights } =
    part === "decoder" ? attentionToPrompt(header.axes, mean) : { ...sides(header, entry), weights: mean };
  const merged =
    context.state.get("unit", "words") === "words"
      ? mergeWords(queries, keys, weights)
      : { queries: tokenLabels(queries), keys: tokenLabels(keys), weights };
  const special = keys.findIndex((token) => !token.special); // special tokens before the first word are never masked
  const shifted = (point, by) => point && { ...point, c: point.c < 0 ? point.c : Math.max(point.c + by, 0) };
  const map = mapIn(context, {
    rows: merged.queries,
    columns: merged.keys,
    values: merged.weights,
    name: "Attention, mean of all heads",
    onFocus: (point) => onFocus(shifted(point, -special)),
  });
  const title = `Attention: ${part === "cross" ? "cross-attention" : `${part} self-attention`}, mean of all heads`;
  const box = mapFigure(context, map, {
    title,
    note: "Not by itself an explanation: compare with the importance.",
    legend: legend({ label: "attention weight" }),
    svgTitle: () => title,
    name: "attention",
  });
  clear(container).append(box);
  return { mark: (point) => map.mark(shifted(point, special)) };
}

function showOverall(container, context, line) {
  const text = (i) => `${signedNumber(line.overall[i])}${line.exact ? "" : ` ± ${line.overall_error[i].toFixed(2)}`}`;
  const rows = (line.grid ? [] : line.inputs).map((label, i) => ({
    label: visible(label),
    value: line.overall[i],
    error: line.exact ? 0 : 2 * line.overall_error[i],
    text: text(i),
  }));
  const overall = barFigure(context, {
    title: "Importance for the whole output",
    note:
      `Change in log-probability. With nothing masked it is ${signedNumber(line.whole)}, with everything masked ` +
      `${signedNumber(line.nothing)}.${line.exact ? "" : " Error bars: two standard errors."}`,
    rows,
    columns: ["input", "importance", "standard error"],
    cells: (row, i) => [row.label, signedNumber(row.value), line.overall_error[i].toFixed(3)],
    name: "overall",
  });
  const curves = ["deletion", "insertion"].map((kind) => explainCurve(context, line, kind));
  clear(container).append(line.grid ? "" : overall, el("div", { class: "columns" }, curves));
}

function explainCurve(context, line, kind) {
  const curves = line.curves[kind];
  const areas = line.curves.areas[kind];
  const orders = Object.keys(ORDER_NAMES).filter((name) => curves[name]);
  const deletion = kind === "deletion";
  const under = orders.map((name) => `${ORDER_NAMES[name]} ${signedNumber(areas[name])}`).join(", ");
  return lineChart(context, {
    title: `${deletion ? "Deletion" : "Insertion"}: most important ${line.grid ? "pixels" : "inputs"} ${deletion ? "masked" : "shown"} first`,
    note: `The faster the curve ${deletion ? "falls" : "rises"}, the better the order. Area under the curve: ${under}.`,
    x: { label: `${line.grid ? "pixels" : "inputs"} ${deletion ? "masked" : "shown"}`, values: line.curves.counts },
    y: { label: line.grid ? "probability" : "log-probability" },
    series: orders.map((name) => ({
      name: ORDER_NAMES[name],
      values: curves[name],
      dashed: name === "random",
      colour: OKABE[Object.keys(ORDER_NAMES).indexOf(name)],
    })),
    name: kind,
  });
}

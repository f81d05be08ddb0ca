// Interventions: ablated heads, masked words, edited attention rows, and the output with them.
import { button, clear, debounce, el, field, select, slider } from "../dom.js";
import { PART_NAMES, PART_ORDER, attentions, headOptions, headWeights, maskedCells } from "../attention_map.js";
import { barFigure } from "../bars.js";
import { PICTURED, axisArrays, elementPicture, unitLabels, unitName, unitsOf } from "../element_picture.js";
import { innerContext } from "../figure.js";
import { exactNumber, percent, signedNumber } from "../numbers.js";
import { anyOf, listIn } from "../state.js";
import { sides, tokenLabels, visible, wordGroups, wordLabels } from "../tokens.js";

const MAX_SLIDERS = 64; // of one attention row

export const changes = {
  id: "changes",
  title: "Interventions",
  about: "Ablate a head, hide a part of the input or edit a row of attention, and see how the output changes.",
  lacking: "There is no output to change yet: type a text above.",
  needs: (header) => header !== null && (header.output.p.length > 0 || header.output.numbers !== null),
  async render(root, context) {
    const { header } = context.trace;
    const results = el("div", { class: "stack", aria: { live: "off" } });
    const list = el("div", { class: "row changes-list" });
    const editor = rowEditor(context);
    const isPictured = PICTURED.includes(header.axes[inputSide(header)].kind);
    const input = isPictured ? await partSwitches(context) : { element: wordSwitches(context), show: () => {} };
    const isWide = ["frames", "steps"].includes(header.axes[inputSide(header)].kind);
    const controls = el("div", { class: "stack" }, isWide ? null : input.element, headSwitches(context), editor.element);
    if (!context.source.live) {
      const text = "This file shows recorded results; for other interventions, open the run with `regard look`.";
      root.append(el("p", { class: "note", text }));
    }
    if (isWide) root.append(input.element);
    root.append(el("div", { class: "columns changes-columns" }, controls, el("div", { class: "stack" }, list, results)));

    let updates = 0;
    let pictures = innerContext(context);
    async function update(announced) {
      const mine = (updates += 1);
      showList(list, context);
      input.show();
      for (const chip of root.querySelectorAll("[data-change]")) {
        chip.setAttribute("aria-pressed", String(hasChanges(context.state, JSON.parse(chip.dataset.change))));
      }
      results.classList.add("waiting");
      try {
        const made = changeList(context.state);
        const changed = made.length ? await context.source.trace({ ...context.request, changes: made }) : null;
        if (mine !== updates) return;
        pictures.end();
        pictures = innerContext(context);
        showResults(results, pictures.context, changed?.header);
        if (announced) context.announce(resultText(context.trace.header, changed?.header));
      } catch (error) {
        if (mine !== updates || context.signal.aborted) return;
        clear(results).append(el("p", { class: "note", role: "alert", text: error.message }));
      } finally {
        if (mine === updates) results.classList.remove("waiting");
      }
    }

    const stop = context.state.subscribe((changed) => {
      if (changed.has("run")) context.state.set({ changes: null, row: null });
      else if (changed.has("text") && !changed.has("changes"))
        setChanges(context.state, changeList(context.state).filter((one) => one.kind === "head"));
      if (anyOf(changed, "run", "text", "step")) return; // app.js draws the view again
      if (changed.has("row")) editor.refresh();
      if (changed.has("changes")) update(true);
    });
    await Promise.all([update(false), editor.refresh()]);
    return stop;
  },
};

// ---- the list of interventions, in the field `changes`

const changeList = (state) => listIn(state, "changes");
const sameChange = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const hasChanges = (state, wanted) => wanted.every((one) => changeList(state).some((made) => sameChange(made, one)));

function setChanges(state, list, push = false) {
  state.set({ changes: list.length ? JSON.stringify(list) : null }, { push });
}

/** Adds these interventions, or removes them if all of them are there. */
function toggleChanges(state, wanted) {
  const others = changeList(state).filter((made) => !wanted.some((one) => sameChange(made, one)));
  setChanges(state, hasChanges(state, wanted) ? others : [...others, ...wanted], true);
}

function changeChip(context, text, label, wanted) {
  return button(text, () => toggleChanges(context.state, wanted), {
    class: "chip",
    data: { change: JSON.stringify(wanted) },
    aria: { pressed: String(hasChanges(context.state, wanted)), label },
  });
}

function attentionName(attention) {
  return `${PART_NAMES[attention.part]}, layer ${attention.layer + 1}`;
}

function changeText(header, change) {
  const axis = header.axes[change.side];
  if (change.kind === "edge") return `edge ${change.ends.map((i) => axis.elements[i]?.label ?? "?").join(":")} hidden`;
  if (PICTURED.includes(axis?.kind)) return `${hiddenName(axis, [change.element])} hidden`;
  if (change.kind === "hide") return `“${visible(header.axes[change.side]?.elements?.[change.element]?.text.trim() ?? "?")}” masked`;
  const attention = header.attention.find((one) => one.name === change.attention);
  const name = attention ? attentionName(attention) : change.attention;
  const head = change.head === null ? "all heads" : `head ${change.head + 1}`;
  return change.kind === "head" ? `${name}, ${head} ablated` : `${name}, ${head}: row ${change.query + 1} edited`;
}

/** A part of an input in words; neighbouring frames are one stretch of time. */
function hiddenName(axis, elements) {
  const [first, last] = [axis.elements[elements[0]], axis.elements[elements.at(-1)]];
  if (!first || !last) return "?";
  if (axis.kind === "frames") return `${first.time[0].toFixed(2)} to ${last.time[1].toFixed(2)} s`;
  const label = axis.kind === "steps" ? String(axis.steps[first.group].number) : first.label;
  return unitName(axis, label);
}

/** The interventions as [text, changes]: hidden frames that follow each other are one. */
function listedChanges(header, list) {
  const isFrame = (one) => one.kind === "hide" && header.axes[one.side]?.kind === "frames";
  const hidden = list.filter(isFrame).sort((a, b) => a.element - b.element);
  const stretches = [];
  for (const one of hidden) {
    if (stretches.at(-1)?.at(-1).element === one.element - 1) stretches.at(-1).push(one);
    else stretches.push([one]);
  }
  const others = list.filter((one) => !isFrame(one)).map((one) => [changeText(header, one), [one]]);
  const named = (stretch) => hiddenName(header.axes[stretch[0].side], stretch.map((one) => one.element));
  return [...others, ...stretches.map((stretch) => [`${named(stretch)} hidden`, stretch])];
}

function showList(container, context) {
  const list = changeList(context.state);
  const chips = listedChanges(context.trace.header, list).map(([text, gone]) => {
    const undo = () => setChanges(context.state, list.filter((other) => !gone.includes(other)));
    return button(`${text} ×`, undo, { class: "chip", aria: { label: `Undo: ${text}` } });
  });
  clear(container).append(
    el("span", { class: "quiet", text: list.length ? "Interventions:" : "No interventions yet." }),
    ...chips,
    chips.length > 1 ? button("Undo all", () => setChanges(context.state, [])) : "",
  );
}

// ---- controls

const controlCard = (title, hint, ...content) =>
  el("section", { class: "card stack" }, el("h3", { text: title }), el("p", { class: "hint", text: hint }), ...content);

function headSwitches(context) {
  const { header } = context.trace;
  const parts = PART_ORDER.filter((part) => attentions(header, part).length);
  const groups = parts.map((part) => {
    const lines = attentions(header, part).map((attention) => headLine(context, attention));
    const props = { class: "head-group", role: "group", aria: { label: PART_NAMES[part] } };
    return el("div", props, el("h4", { text: PART_NAMES[part] }), lines);
  });
  const none = el("p", { class: "quiet", text: "This model has no attention heads." });
  return controlCard("Ablate a head", "The output of the head is set to zero.", groups.length ? groups : none);
}

function headLine(context, attention) {
  const heads = Array.from({ length: attention.heads }, (_, head) =>
    changeChip(context, String(head + 1), `${attentionName(attention)}, head ${head + 1} ablated`, [
      { kind: "head", attention: attention.name, head },
    ]),
  );
  return el("div", { class: "head-line" }, el("span", { class: "quiet", text: `layer ${attention.layer + 1}` }), heads);
}

/** The axis of the input: the source, or in a decoder-only model the one sequence that it reads. */
const inputSide = (header) => (header.axes.source.elements.length ? "source" : "inputs");

/** The side whose words can be masked: the source, or the prompt of a decoder-only model. */
function maskableSide(header) {
  const side = inputSide(header);
  const { elements } = header.axes[side];
  return { side, tokens: side === "source" ? elements : elements.filter((token) => token.given) };
}

const HIDING = {
  patches: ["Hide a patch", "Click a patch: its pixels become grey."],
  frames: ["Hide a stretch of sound", "Click a stretch, or drag over several: their features become the mean of the recording."],
  steps: ["Hide a step", "Click a step: no other step attends to it."],
  nodes: ["Hide a node or an edge", "Click a node: it neither attends nor is attended to. Click an edge: its nodes do not attend to each other."],
};

/** The picture of an input whose parts can be hidden. */
async function partSwitches(context) {
  const { header } = context.trace;
  const side = inputSide(header);
  const axis = header.axes[side];
  const [arrays, units] = [await axisArrays(context.trace, axis), unitsOf(axis)];
  const labels = unitLabels(axis, units);
  const hiding = (i) => ({ kind: "hide", side, element: units[i][0] });
  const edge = (a, b) => ({ kind: "edge", side, ends: [a, b] });
  const [title, hint] = HIDING[axis.kind];
  const picture = elementPicture({
    label: `${title}; arrow keys move, Enter hides`,
    onPick: (i) => toggleChanges(context.state, [hiding(i)]),
    onPickEdge: (a, b) => toggleChanges(context.state, [edge(a, b)]),
    onStretch:
      axis.kind === "frames" &&
      ((first, last) => toggleChanges(context.state, units.slice(first, last + 1).map((_, i) => hiding(first + i)))),
    announce: context.announce,
  });

  function show() {
    const made = changeList(context.state);
    const gone = new Set(made.filter((one) => one.kind === "hide").map((one) => one.element));
    picture.show({
      axis,
      arrays,
      units,
      hidden: new Set(units.flatMap(([first], i) => (gone.has(first) ? [i] : []))),
      hiddenEdges: made.filter((one) => one.kind === "edge").map((one) => one.ends),
      describe: (i) => `Hide ${unitName(axis, labels[i])}`,
      describeEdge: (a, b) => `Hide the edge ${labels[a]}:${labels[b]}`,
    });
  }

  show();
  return { element: controlCard(title, hint, picture.element), show };
}

function wordSwitches(context) {
  const { side, tokens } = maskableSide(context.trace.header);
  const groups = wordGroups(tokens).filter((group) => !tokens[group[0]].special);
  const labels = wordLabels(tokens, groups);
  const chips = groups.map((group, i) => {
    const wanted = group.map((token) => ({ kind: "hide", side, element: token }));
    return changeChip(context, labels[i], `${labels[i]} masked`, wanted);
  });
  return controlCard(
    side === "source" ? "Mask a source word" : "Mask a word of the prompt",
    "Its tokens are replaced by the unknown token.",
    el("div", { class: "row", role: "group", aria: { label: "Words to mask" } }, chips),
  );
}

/** The editor of an attention row; the address names it as `row=ATTENTION:HEAD:QUERY`, HEAD "all" for every head. */
function rowEditor(context) {
  const { header } = context.trace;
  const element = el("section", { class: "card stack" });
  const editable = header.attention.filter((one) => one.editable !== false); // attention along edges has no rows
  const usual = editable.find((one) => one.part === "cross") ?? editable[0];

  element.hidden = !usual;

  function chosenRow() {
    const [name, head, query] = context.state.get("row", "").split(":");
    const attention = editable.find((one) => one.name === name) ?? usual;
    const { queries, keys } = sides(header, attention);
    return {
      attention,
      keys,
      queries,
      head: head === undefined || head === "all" ? null : Math.min(Number(head) || 0, attention.heads - 1),
      query: Math.min(Number(query) || 0, queries.length - 1),
    };
  }

  const choose = (attention, head, query) => context.state.set({ row: `${attention}:${head ?? "all"}:${query}` });
  const isThis = (made, { attention, head, query }) =>
    made.kind === "row" && made.attention === attention.name && made.head === head && made.query === query;

  function write(row, weights) {
    const others = changeList(context.state).filter((made) => !isThis(made, row));
    const { attention, head, query } = row;
    const rounded = weights && Array.from(weights, (weight) => Math.round(weight * 1000) / 1000);
    const edited = weights ? [{ kind: "row", attention: attention.name, head, query, weights: rounded }] : [];
    setChanges(context.state, [...others, ...edited]);
  }

  async function refresh() {
    if (!usual) return;
    const row = chosenRow();
    const { attention, head, query, queries, keys } = row;
    const recorded = await rowWeights(context.trace, attention, head, query);
    const made = changeList(context.state).find((one) => isThis(one, row));
    const weights = Float32Array.from(made && made.weights.length === keys.length ? made.weights : recorded);
    const [queryNames, keyNames] = [tokenLabels(queries), tokenLabels(keys)];
    const writeSoon = debounce(() => write(row, weights), 200);
    const masked = maskedCells(header, attention)?.subarray(query * keys.length);
    const free = keyNames.map((_, k) => k).filter((k) => !masked?.[k]); // keys that this query may attend to
    const sliders = free.slice(0, MAX_SLIDERS).map((k) => {
      const range = { min: 0, max: 1, step: 0.01, value: weights[k], format: (weight) => weight.toFixed(2) };
      return slider(keyNames[k], range, (weight) => {
        weights[k] = weight;
        writeSoon();
      });
    });
    const fill = (share) => {
      weights.fill(0);
      for (const k of free) weights[k] = share(k);
      sliders.forEach((one, i) => one.show(weights[free[i]]));
      write(row, weights);
    };
    const single = select([["", "choose a token"], ...free.map((k) => [k, keyNames[k]])], "", (k) => {
      if (k !== "") fill((other) => (other === Number(k) ? 1 : 0));
    });
    const reset = () => {
      write(row, null);
      refresh();
    };
    const maps = editable.map((one) => [one.name, attentionName(one)]);
    const heads = headOptions(attention, ["all", "All heads"]);
    const rows = queryNames.map((label, q) => [q, `${q + 1}: ${label}`]);
    const more = free.length > MAX_SLIDERS;
    const hidden = keyNames.length - free.length;
    clear(element).append(
      el("h3", { text: "Edit an attention row" }),
      el("p", {
        class: "hint",
        text:
          "The original output is forced and scored with the edited weights, which are normalised to sum to 1; " +
          "the output that the model generates freely is shown beside it.",
      }),
      el(
        "div",
        { class: "controls" },
        field("Map", select(maps, attention.name, (name) => choose(name, head, query))),
        field("Head", select(heads, head ?? heads[0][0], (value) => choose(attention.name, value, query))),
        field("Row of", select(rows, query, (value) => choose(attention.name, head, value))),
      ),
      el("div", { class: "row-sliders", role: "group", aria: { label: `Weights of ${queryNames[query]}` } }, sliders),
      el("p", { class: "quiet", hidden: !more, text: `Only the first ${MAX_SLIDERS} of ${free.length} tokens have sliders.` }),
      el("p", { class: "quiet", hidden: !hidden, text: `${hidden} tokens are masked for this one.` }),
      el(
        "div",
        { class: "row" },
        field("All weight on", single),
        button("Uniform", () => fill(() => 1 / free.length)),
        button("Reset", reset),
      ),
    );
  }

  return { element, refresh };
}

/** A recorded row of one head, or of the mean of all heads. */
async function rowWeights(trace, attention, head, query) {
  const tensor = await trace.array(attention.array);
  const { values, scale } = headWeights(tensor, head ?? "mean");
  const keys = tensor.shape[2];
  return Float32Array.from(values.subarray(query * keys, (query + 1) * keys), (weight) => weight * scale);
}

// ---- results

const sumAt = (numbers, positions) => positions.reduce((sum, i) => sum + numbers[i], 0);

/** The log-probability of the original output before and with the interventions, and the output of the changed model. */
function compareOutputs(header, changed) {
  const target = header.axes.target.elements;
  const generated = target.map((_, i) => i).filter((i) => !target[i].given);
  const before = sumAt((changed?.before ?? header.output).logp, generated);
  if (!changed) return { generated, before };
  const free = changed.forced ? changed.free : { text: changed.text.target, logp: changed.text.logp };
  const after = sumAt(changed.held.logp, generated);
  return { generated, before, after, free, same: free?.text === header.text.target };
}

function showResults(container, context, changed) {
  const { header } = context.trace;
  if (header.output.numbers) {
    const now = changed && outputCard("changed", "With intervention", changed.text.target, null);
    const cards = [outputCard("original", "Original", header.text.target, null), now];
    clear(container).append(el("div", { class: "outputs" }, cards));
    return;
  }
  const { generated, before, after, free, same } = compareOutputs(header, changed);
  const [was, now] = [(changed?.before ?? header.output).p, (changed?.held ?? header.output).p];
  const labels = tokenLabels(header.axes.target.elements);
  const original = `Log-probability of the output: ${exactNumber(before)}`;
  const difference = changed && `${exactNumber(after)} with the intervention (${signedNumber(after - before)})`;
  clear(container).append(
    el(
      "div",
      { class: "outputs" },
      outputCard("original", "Original", header.text.target, before),
      changed?.forced
        ? outputCard("forced", "With intervention, original output forced", changed.text.target, after, "forced")
        : null,
      free
        ? outputCard(
            "changed",
            changed.forced ? "With intervention, free output (greedy)" : "With intervention",
            free.text,
            free.logp,
            same ? "same output" : "different output",
          )
        : null,
    ),
    barFigure(context, {
      title: "Probability of the original output",
      note: changed ? `${original} before, ${difference}.` : `${original}.`,
      rows: generated.map((i) => ({
        label: labels[i],
        value: now[i],
        before: changed ? was[i] : undefined,
        text: changed ? `${percent(was[i])} → ${percent(now[i])}` : percent(was[i]),
      })),
      columns: ["token", "before", "with intervention", "difference"],
      cells: (row, n) => {
        const [p, q] = [was[generated[n]], now[generated[n]]];
        return [row.label, p.toFixed(4), q.toFixed(4), signedNumber(q - p)];
      },
      key: changed ? [["now", "with intervention"], ["before", "before"]] : [],
      name: "changes",
    }),
  );
}

function outputCard(kind, title, text, logp, remark = "") {
  return el(
    "div",
    { class: "card", data: { output: kind } },
    el("h3", { text: title }),
    el("p", { class: "output-text", dir: "auto", text: text.trim() || "∅" }),
    logp === null
      ? null
      : el("p", { class: "quiet num", text: `log-probability ${exactNumber(logp)}${remark ? ` · ${remark}` : ""}` }),
  );
}

function resultText(header, changed) {
  if (!changed) return `No interventions: ${header.text.target}`;
  if (header.output.numbers) return `The output is now: ${changed.text.target}`;
  const { before, after, free, same } = compareOutputs(header, changed);
  const output = !free ? "The output is forced" : same ? "The output is the same" : `The output is now: ${free.text}`;
  return `${output}. Log-probability of the original ${exactNumber(before)} before, ${exactNumber(after)} with the intervention.`;
}

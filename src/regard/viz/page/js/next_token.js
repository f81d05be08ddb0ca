// The last stages of the walkthrough: the logits, and the next token chosen from them by hand or by sampling.
import { button, clear, debounce, el, slider } from "./dom.js";
import { barFigure } from "./bars.js";
import { innerContext, tableOf } from "./figure.js";
import { exactNumber, percent, signedNumber, summary, thousands } from "./numbers.js";
import { drawnNumber, keptTokens, tokenAt } from "./sampling.js";
import { openPages } from "./tensors.js";
import { joined, tokenLabels, visible } from "./tokens.js";

const LOGITS_PER_PAGE = 50;

async function logitsAt(selection) {
  const trace = selection.trace();
  return (await trace.array(`${trace.header.output.logits}/${selection.position("inputs")}`)).data;
}

export function logitsStage() {
  return {
    id: "logits",
    title: "Logits",
    about:
      "The dot product of the last vector with the output embedding of every token gives one logit per token; " +
      "softmax turns the logits into probabilities.",
    side: "inputs",
    async show(content, context, selection) {
      const { header } = selection.trace();
      const position = selection.position("inputs");
      const logits = await logitsAt(selection);
      const count = thousands(logits.length);
      const name = `Logits after ${tokenLabels(header.axes.inputs.elements)[position]}`;
      const openAll = async () => openLogits(context, name, logits, await selection.trace().vocabulary());
      content.append(
        barFigure(context, {
          title: `Most likely of ${count} tokens`,
          note: "Bars: probability. A logit that is greater by 1 makes a token 2.7 times as likely.",
          rows: header.output.top[position].map(({ id, text, p }) => ({
            id,
            label: visible(text),
            value: p,
            logit: logits[id],
            text: `${percent(p)} · logit ${signedNumber(logits[id])}`,
          })),
          columns: ["token", "id", "logit", "probability"],
          cells: (row) => [row.label, row.id, exactNumber(row.logit), row.value.toFixed(4)],
          name: "logits",
        }),
        el("div", { class: "row" }, button(`All ${count} logits`, () => openAll().catch(context.failed))),
      );
    },
  };
}

/** A dialog with every token of the vocabulary, its logit and its probability, in descending order. */
function openLogits(context, name, logits, vocabulary) {
  const order = keptTokens(logits, { temperature: 1, topK: 0, topP: 1 });
  const tokens = vocabulary.map(visible);
  openPages(context, {
    name,
    facts: `${summary(logits)}. Sorted by logit.`,
    pages: Math.ceil(order.length / LOGITS_PER_PAGE),
    turns: ["More likely tokens", "Less likely tokens"],
    page: (n) => {
      const [from, to] = [n * LOGITS_PER_PAGE, Math.min((n + 1) * LOGITS_PER_PAGE, order.length)];
      return tableOf({
        caption: `Tokens ${from + 1} to ${to} of ${order.length}`,
        columns: ["token", "id", "logit", "probability"],
        rows: order
          .slice(from, to)
          .map(({ id, p }) => [tokens[id] ?? `token ${id}`, id, exactNumber(logits[id]), percent(p)]),
      });
    },
  });
}

/** The sampling settings in the address; `regard generate` has the same. */
function samplingSettings(state) {
  return {
    temperature: Number(state.get("temperature", "1")),
    topK: Number(state.get("topk", "0")),
    topP: Number(state.get("topp", "1")),
    seed: Number(state.get("draw", "0")),
  };
}

export function nextTokenStage() {
  return {
    id: "choose",
    title: "Next token",
    about: "Temperature, then top-k, then top-p; one of the remaining tokens is sampled and appended to the text.",
    side: "inputs",
    async show(content, context, selection) {
      const { state } = context;
      const { header } = selection.trace();
      const position = selection.position("inputs");
      const target = header.axes.target.elements[position];
      const given = Boolean(target?.given);
      const [logits, vocabulary] = await Promise.all([logitsAt(selection), selection.trace().vocabulary()]);
      const result = el("div", { class: "stack" });
      let inner = innerContext(context);
      const show = () => {
        inner.end();
        inner = innerContext(context);
        showOptions(result, inner.context, selection, { logits, vocabulary, given });
      };
      const showSoon = debounce(show, 30);
      const set = (name) => (value) => {
        state.set({ [name]: value });
        showSoon();
      };
      const settings = samplingSettings(state);
      const twoDigits = { step: 0.05, format: (value) => value.toFixed(2) };
      const p = header.output.p[position]; // null for a token outside the output vocabulary
      const fixed = given
        ? `This position is part of the input text, which continues with “${visible(target.text)}”${p === null ? "" : ` (${percent(p)})`}.`
        : "";
      const topK = { min: 0, max: 50, value: settings.topK, format: (k) => (k ? String(k) : "all") };
      content.append(
        textSoFar(header, position),
        el(
          "div",
          { class: "controls" },
          slider("Temperature", { ...twoDigits, min: 0.1, max: 3, value: settings.temperature }, set("temperature")),
          slider("Top-k", topK, set("topk")),
          slider("Top-p", { ...twoDigits, min: 0.05, max: 1, value: settings.topP }, set("topp")),
          slider("Seed", { min: 0, max: 99, value: settings.seed }, set("draw")),
        ),
        el("p", { class: "note", hidden: !given, text: fixed }),
        result,
      );
      show();
    },
  };
}

/** The text before the next token: the prompt, and what was generated after it. */
function textSoFar(header, position) {
  const tokens = header.axes.inputs.elements.slice(0, position + 1).filter((token) => !token.special);
  const prompt = header.model.task === "generate" ? header.text.source : "";
  const text = joined(tokens.map((token) => token.text));
  const shared = text.startsWith(prompt) ? prompt : "";
  const generated = el("b", { text: text.slice(shared.length) });
  return el("p", { class: "walk-text", dir: "auto" }, el("span", { class: "quiet", text: shared }), generated, " …");
}

function showOptions(result, context, selection, { logits, vocabulary, given }) {
  const { header } = selection.trace();
  const position = selection.position("inputs");
  const settings = samplingSettings(context.state);
  const kept = keptTokens(logits, settings, header.output.forbidden);
  const probability = new Map(kept.map(({ id, p }) => [id, p]));
  const top = header.output.top[position];
  const listed = new Set(top.map(({ id }) => id));
  const label = (id) => visible(vocabulary[id]);
  const rows = top.map(({ id, text, p }) => ({
    id,
    label: visible(text),
    value: probability.get(id) ?? 0,
    before: p,
    excluded: !probability.has(id),
    text: probability.has(id) ? percent(probability.get(id)) : "excluded",
    act: given ? null : () => choose(id, "chosen"),
    actLabel: `Choose ${visible(text)}, ${percent(probability.get(id) ?? 0)}`,
  }));
  const rest = kept.filter(({ id }) => !listed.has(id));
  if (rest.length) {
    const share = rest.reduce((sum, { p }) => sum + p, 0);
    rows.push({ label: `${thousands(rest.length)} others`, value: share, text: percent(share) });
  }
  const number = drawnNumber(settings.seed, selection.generatedIds().length);
  const drawn = tokenAt(kept, number);

  async function choose(id, how) {
    try {
      await selection.append(id);
      context.announce(`${label(id)} ${how}, ${percent(probability.get(id) ?? 0)}`);
    } catch (error) {
      result.append(el("p", { class: "note", role: "alert", text: `${label(id)}: ${error.message}` }));
    }
  }

  clear(result).append(
    barFigure(context, {
      title: `${thousands(kept.length)} of ${thousands(logits.length)} tokens can come next`,
      note: given ? "" : "Click a token to choose it.",
      rows,
      columns: ["token", "id", "probability", "without the settings"],
      cells: (row) => [row.label, row.id ?? "", row.value.toFixed(4), row.before === undefined ? "" : row.before.toFixed(4)],
      key: [["now", "with these settings"], ["before", "the model's probability"]],
      name: "next-token",
    }),
  );
  if (given) {
    const next = () => selection.append(header.axes.target.elements[position].id);
    const proceed = button("Continue with the text", next, { class: "main", data: { act: "draw" } });
    result.append(el("div", { class: "row" }, proceed));
    return;
  }
  const started = context.state.get("continuation") || context.state.get("token");
  const same = header.model.task === "generate" ? ", as for `regard generate --seed`" : "";
  const hint = `The number is compared with the cumulative probabilities of the kept tokens; it depends on the seed${same}.`;
  result.append(
    el(
      "div",
      { class: "row" },
      button(`Sample: ${number.toFixed(3)} selects “${label(drawn.id)}”`, () => choose(drawn.id, "sampled"), {
        class: "main",
        data: { act: "draw", drawn: drawn.id },
      }),
      button(`Most likely: “${label(kept[0].id)}”`, () => choose(kept[0].id, "chosen"), { data: { act: "likeliest" } }),
      started ? button("Start over", () => context.state.set({ continuation: null, token: null })) : null,
    ),
    el("p", { class: "hint", text: hint }),
  );
}

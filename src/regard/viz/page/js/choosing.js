// The end of the walk: logits, and the next token chosen from them by hand or by chance.
import { button, clear, debounce, el, slider } from "./dom.js";
import { barFigure, exactNumber, innerContext, numberFacts, openPages, percent, signedNumber } from "./bits.js";
import { tableOf } from "./figure.js";
import { drawnNumber, keptTokens, tokenAt } from "./sampling.js";
import { joined, tokenLabels, visible } from "./tokens.js";

async function rowLogits(place) {
  const trace = place.trace();
  return (await trace.array(`${trace.header.output.logits}/${place.at("inputs")}`)).data;
}

export function logitsStation() {
  return {
    id: "logits",
    title: "Logits",
    about:
      "The last vector meets the vector of every token in the vocabulary: a number each. Softmax turns these numbers " +
      "into probabilities.",
    side: "inputs",
    async show(content, context, place) {
      const { header } = place.trace();
      const at = place.at("inputs");
      const logits = await rowLogits(place);
      const pieces = header.output.top[at];
      const many = logits.length.toLocaleString("en");
      const name = `Logits after ${tokenLabels(header.tokens.inputs)[at]}`;
      const openAll = async () => allLogits(context, name, logits, await place.trace().vocabulary());
      content.append(
        barFigure(context, {
          title: `The likeliest of ${many} tokens`,
          note: "Bars: probability. A logit that is 1 greater is a token 2.7 times as likely.",
          rows: pieces.map(({ id, piece, p }) => ({
            id,
            label: visible(piece),
            value: p,
            logit: logits[id],
            said: `${percent(p)} · logit ${signedNumber(logits[id])}`,
          })),
          columns: ["token", "id", "logit", "probability"],
          cells: (row) => [row.label, row.id, exactNumber(row.logit), row.value.toFixed(4)],
          name: "logits",
        }),
        el(
          "div",
          { class: "row" },
          button(`All ${many} logits`, () => openAll().catch(context.failed)),
        ),
      );
    },
  };
}

const LOGITS_SHOWN = 50; // on a page of all of them

/** Every token of the vocabulary with its logit and probability, the likeliest first, a page at a time. */
function allLogits(context, name, logits, vocabulary) {
  const order = keptTokens(logits, { temperature: 1, topK: 0, topP: 1 });
  const words = vocabulary.map(visible);
  openPages(context, {
    name,
    facts: `${numberFacts(logits).text}. Sorted by logit; softmax turns them into probabilities.`,
    pages: Math.ceil(order.length / LOGITS_SHOWN),
    turns: ["Likelier tokens", "Less likely tokens"],
    page: (n) =>
      tableOf({
        caption: `Tokens ${n * LOGITS_SHOWN + 1} to ${Math.min((n + 1) * LOGITS_SHOWN, order.length)} of ${order.length}`,
        columns: ["token", "id", "logit", "probability"],
        rows: order
          .slice(n * LOGITS_SHOWN, (n + 1) * LOGITS_SHOWN)
          .map(({ id, p }) => [words[id] ?? `token ${id}`, id, exactNumber(logits[id]), percent(p)]),
      }),
  });
}

/** Numbers moved by hand, in the address; `regard generate` takes the same ones. */
function samplingOf(state) {
  return {
    temperature: Number(state.get("temperature", "1")),
    topK: Number(state.get("topk", "0")),
    topP: Number(state.get("topp", "1")),
    seed: Number(state.get("draw", "0")),
  };
}

export function chooseStation() {
  return {
    id: "choose",
    title: "The next token",
    about:
      "Temperature first, then only the k likeliest, then the fewest of these that reach p together; one is taken, and " +
      "the text is one token longer.",
    side: "inputs",
    async show(content, context, place) {
      const { state } = context;
      const { header } = place.trace();
      const at = place.at("inputs");
      const target = header.tokens.target[at];
      const given = Boolean(target?.given);
      const [logits, vocabulary] = await Promise.all([rowLogits(place), place.trace().vocabulary()]);
      const result = el("div", { class: "stack" });
      let shown = innerContext(context);
      const show = () => {
        shown.end();
        shown = innerContext(context);
        showChoice(result, shown.context, place, { logits, vocabulary, given });
      };
      const move = debounce(show, 30);
      const set = (name) => (value) => {
        state.set({ [name]: value });
        move();
      };
      const settings = samplingOf(state);
      const inSteps = { step: 0.05, format: (value) => value.toFixed(2) };
      const p = header.output.p[at]; // none of a token that the output's vocabulary does not have
      const told = given
        ? `Here the text itself goes on, with “${visible(target.piece)}”${p === null ? "" : ` (${percent(p)})`}.`
        : "";
      content.append(
        textSoFar(header, at),
        el(
          "div",
          { class: "controls" },
          slider("Temperature", { ...inSteps, min: 0.1, max: 3, value: settings.temperature }, set("temperature")),
          slider(
            "Top-k",
            { min: 0, max: 50, value: settings.topK, format: (k) => (k ? String(k) : "all") },
            set("topk"),
          ),
          slider("Top-p", { ...inSteps, min: 0.05, max: 1, value: settings.topP }, set("topp")),
          slider("Seed", { min: 0, max: 99, value: settings.seed }, set("draw")),
        ),
        el("p", { class: "note", hidden: !given, text: told }),
        result,
      );
      show();
    },
  };
}

/** What the model has before it when it chooses: the prompt, and what was said since. */
function textSoFar(header, at) {
  const tokens = header.tokens.inputs.slice(0, at + 1).filter((token) => !token.mark);
  const prompt = header.model.task === "generate" ? header.text.source : "";
  const text = joined(tokens.map((token) => token.piece));
  const shared = text.startsWith(prompt) ? prompt : "";
  const said = el("b", { text: text.slice(shared.length) });
  return el("p", { class: "walk-text", dir: "auto" }, el("span", { class: "quiet", text: shared }), said, " …");
}

function showChoice(result, context, place, { logits, vocabulary, given }) {
  const { header } = place.trace();
  const at = place.at("inputs");
  const settings = samplingOf(context.state);
  const kept = keptTokens(logits, settings, header.output.forbidden);
  const chance = new Map(kept.map(({ id, p }) => [id, p]));
  const pieces = new Map(header.output.top[at].map(({ id, piece }) => [id, visible(piece)]));
  const written = (id) => visible(vocabulary[id]);
  const shown = header.output.top[at].map(({ id, piece, p }) => ({
    id,
    label: visible(piece),
    value: chance.get(id) ?? 0,
    was: p,
    out: !chance.has(id),
    said: chance.has(id) ? percent(chance.get(id)) : "left out",
    act: given ? null : () => take(id, "chosen"),
    actName: `Take ${visible(piece)}, ${percent(chance.get(id) ?? 0)}`,
  }));
  const rest = kept.filter(({ id }) => !pieces.has(id));
  if (rest.length) {
    const share = rest.reduce((sum, { p }) => sum + p, 0);
    shown.push({ label: `${rest.length.toLocaleString("en")} others`, value: share, said: percent(share) });
  }
  const number = drawnNumber(settings.seed, place.saidIds().length);
  const drawn = tokenAt(kept, number);

  async function take(id, how) {
    try {
      await place.say(id);
      context.announce(`${written(id)} ${how}, ${percent(chance.get(id) ?? 0)}`);
    } catch (error) {
      result.append(el("p", { class: "note", role: "alert", text: `${written(id)}: ${error.message}` }));
    }
  }

  clear(result).append(
    barFigure(context, {
      title: `${kept.length.toLocaleString("en")} of ${logits.length.toLocaleString("en")} tokens may come next`,
      note: given ? "" : "Press a token to take it.",
      rows: shown,
      columns: ["token", "id", "probability", "before the settings"],
      cells: (row) => [row.label, row.id ?? "", row.value.toFixed(4), row.was === undefined ? "" : row.was.toFixed(4)],
      key: [
        ["now", "with these settings"],
        ["was", "the model's own"],
      ],
      name: "next-token",
    }),
  );
  if (given) {
    const goOn = () => place.say(header.tokens.target[at].id);
    result.append(
      el("div", { class: "row" }, button("Go on with the text", goOn, { class: "main", data: { act: "draw" } })),
    );
    return;
  }
  const begun = context.state.get("said") || context.state.get("token");
  const likewise = header.model.task === "generate" ? ", as in `regard generate --seed`" : "";
  const hint = `Kept tokens lie end to end between 0 and 1; the seed says where the draw falls${likewise}.`;
  result.append(
    el(
      "div",
      { class: "row" },
      button(`Draw: ${number.toFixed(3)} falls on ${written(drawn.id)}`, () => take(drawn.id, "drawn"), {
        class: "main",
        data: { act: "draw", drawn: drawn.id },
      }),
      button(`Take the likeliest: ${written(kept[0].id)}`, () => take(kept[0].id, "taken"), {
        data: { act: "likeliest" },
      }),
      begun ? button("Start over", () => context.state.set({ said: null, token: null })) : null,
    ),
    el("p", { class: "hint", text: hint }),
  );
}

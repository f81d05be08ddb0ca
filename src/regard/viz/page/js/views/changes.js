// Interventions: a head switched off, a word hidden, a row of attention written by hand, and what the model says then.
import { button, clear, debounce, el, field, select, slider } from "../dom.js";
import { barFigure, exactNumber, innerContext, listIn, percent, signedNumber } from "../bits.js";
import { PART_NAMES, PART_ORDER, attentions, headWeights, maskedCells } from "../maps.js";
import { sides, tokenLabels, visible, wordGroups, wordLabels } from "../tokens.js";

const MOST_KEYS = 64; // sliders of one row

export const changes = {
  id: "changes",
  title: "Interventions",
  about: "Switch a head off, hide a word, write a row of attention by hand, and see what the model says then.",
  lacking: "There is no output to change yet: type a text above.",
  needs: (header) => header !== null && header.output.p.length > 0,
  async render(root, context) {
    const results = el("div", { class: "stack", aria: { live: "off" } });
    const made = el("div", { class: "row changes-made" });
    const controls = el("div", { class: "stack" });
    if (!context.source.live) {
      const text = "This file shows what was recorded; to change it, open the run with `regard look`.";
      root.append(el("p", { class: "note", text }));
    }
    root.append(el("div", { class: "columns changes-columns" }, controls, el("div", { class: "stack" }, made, results)));
    const editor = changeEditor(context);

    function showControls() {
      clear(controls).append(headSwitches(context), wordSwitches(context), editor.element);
    }

    let asked = 0;
    let pictures = innerContext(context);
    async function update(say) {
      const turn = (asked += 1);
      showMade(made, context);
      for (const chip of controls.querySelectorAll("[data-change]")) {
        chip.setAttribute("aria-pressed", String(hasChange(context.state, JSON.parse(chip.dataset.change))));
      }
      results.classList.add("waiting");
      try {
        const list = changeList(context.state);
        const changed = list.length ? await context.source.trace({ ...context.request, changes: list }) : null;
        if (turn !== asked) return;
        pictures.end();
        pictures = innerContext(context);
        showResults(results, pictures.context, changed?.header);
        if (say) context.announce(changeSummary(context.trace.header, changed?.header));
      } catch (error) {
        if (turn !== asked || context.signal.aborted) return;
        clear(results).append(el("p", { class: "note", role: "alert", text: error.message }));
      } finally {
        if (turn === asked) results.classList.remove("waiting");
      }
    }

    showControls();
    const stop = context.state.subscribe((changed) => {
      if (changed.has("run")) context.state.set({ changes: null, row: null });
      else if (changed.has("text") && !changed.has("changes")) setChanges(context.state, changeList(context.state).filter((one) => one.kind === "head"));
      if (["run", "text", "step"].some((name) => changed.has(name))) return; // the shell draws anew
      if (changed.has("row")) editor.refresh();
      if (changed.has("changes")) update(true);
    });
    await Promise.all([update(false), editor.refresh()]);
    return stop;
  },
};

const changeList = (state) => listIn(state, "changes");

const sameChange = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const hasChange = (state, wanted) =>
  wanted.every((one) => changeList(state).some((made) => sameChange(made, one)));

function setChanges(state, list, push = false) {
  state.set({ changes: list.length ? JSON.stringify(list) : null }, { push });
}

/** Makes these changes, or takes them back where all of them are made. */
function toggleChanges(state, wanted) {
  const others = changeList(state).filter((made) => !wanted.some((one) => sameChange(made, one)));
  setChanges(state, hasChange(state, wanted) ? others : [...others, ...wanted], true);
}

function changeChip(context, label, name, wanted) {
  return button(label, () => toggleChanges(context.state, wanted), {
    class: "chip",
    data: { change: JSON.stringify(wanted) },
    aria: { pressed: String(hasChange(context.state, wanted)), label: name },
  });
}

function attentionName(attention) {
  return `${PART_NAMES[attention.part]}, layer ${attention.layer + 1}`;
}

function headSwitches(context) {
  const { header } = context.trace;
  const groups = PART_ORDER.filter((part) => attentions(header, part).length).map((part) =>
    el("div", { class: "head-group", role: "group", aria: { label: PART_NAMES[part] } },
      el("h4", { text: PART_NAMES[part] }), attentions(header, part).map((attention) => headLine(context, attention))));
  return el("section", { class: "card stack" },
    el("h3", { text: "Switch a head off" }),
    el("p", { class: "hint", text: "What the head adds becomes zero." }),
    groups.length ? groups : el("p", { class: "quiet", text: "This model does not attend: there is no head to switch off." }));
}

function headLine(context, attention) {
  const heads = Array.from({ length: attention.heads }, (_, head) =>
    changeChip(context, String(head + 1), `${attentionName(attention)}, head ${head + 1} off`, [
      { kind: "head", attention: attention.name, head },
    ]));
  return el("div", { class: "head-line" }, el("span", { class: "quiet", text: `layer ${attention.layer + 1}` }), heads);
}

/** The side whose words can be hidden: the source, or the prompt where there is no source. */
function hideable(header) {
  if (header.tokens.source.length) return { side: "source", tokens: header.tokens.source };
  return { side: "inputs", tokens: header.tokens.inputs.filter((token) => token.given) }; // the first ones
}

function wordSwitches(context) {
  const { side, tokens } = hideable(context.trace.header);
  const groups = wordGroups(tokens).filter((group) => !tokens[group[0]].mark);
  const labels = wordLabels(tokens, groups);
  const chips = groups.map((group, i) =>
    changeChip(context, labels[i], `${labels[i]} hidden`, group.map((token) => ({ kind: "word", side, token }))));
  return el("section", { class: "card stack" },
    el("h3", { text: side === "source" ? "Hide a source word" : "Hide a word of the prompt" }),
    el("p", { class: "hint", text: "Its tokens become the unknown token." }),
    el("div", { class: "row", role: "group", aria: { label: "Words to hide" } }, chips));
}

/** The hand-written row: which one is in the address as `row=ATTENTION:HEAD:QUERY`, HEAD "all" for every head. */
function changeEditor(context) {
  const { header } = context.trace;
  const element = el("section", { class: "card stack" });
  const usual = header.attention.find((one) => one.part === "cross") ?? header.attention[0];

  function chosen() {
    const [name, head, query] = context.state.get("row", "").split(":");
    const attention = header.attention.find((one) => one.name === name) ?? usual;
    const { queries, keys } = sides(header, attention);
    return {
      attention,
      keys,
      queries,
      head: head === undefined || head === "all" ? null : Math.min(Number(head) || 0, attention.heads - 1),
      query: Math.min(Number(query) || 0, queries.length - 1),
    };
  }

  const pick = (attention, head, query) => context.state.set({ row: `${attention}:${head ?? "all"}:${query}` });
  const isThis = (made, { attention, head, query }) =>
    made.kind === "row" && made.attention === attention.name && made.head === head && made.query === query;

  function write(row, weights) {
    const others = changeList(context.state).filter((made) => !isThis(made, row));
    const { attention, head, query } = row;
    const rounded = weights && Array.from(weights, (weight) => Math.round(weight * 1000) / 1000);
    setChanges(context.state, weights
      ? [...others, { kind: "row", attention: attention.name, head, query, weights: rounded }]
      : others);
  }

  async function refresh() {
    if (!usual) return;
    const row = chosen();
    const { attention, head, query, queries, keys } = row;
    const recorded = await rowWeights(context.trace, attention, head, query);
    const made = changeList(context.state).find((one) => isThis(one, row));
    const weights = Float32Array.from(made && made.weights.length === keys.length ? made.weights : recorded);
    const [queryNames, keyNames] = [tokenLabels(queries), tokenLabels(keys)];
    const writeSoon = debounce(() => write(row, weights), 200);
    const masked = maskedCells(header, attention)?.subarray(query * keys.length);
    const free = keyNames.map((_, k) => k).filter((k) => !masked?.[k]); // what this query may see
    const sliders = free.slice(0, MOST_KEYS).map((k) =>
      slider(keyNames[k], { min: 0, max: 1, step: 0.01, value: weights[k], format: (weight) => weight.toFixed(2) }, (weight) => {
        weights[k] = weight;
        writeSoon();
      }));
    const put = (share) => {
      weights.fill(0);
      for (const k of free) weights[k] = share(k);
      sliders.forEach((one, i) => one.show(weights[free[i]]));
      write(row, weights);
    };
    const onlyAt = select([["", "choose a token"], ...free.map((k) => [k, keyNames[k]])], "", (k) => {
      if (k !== "") put((other) => (other === Number(k) ? 1 : 0));
    });
    const many = free.length > MOST_KEYS;
    const hidden = keyNames.length - free.length;
    clear(element).append(
      el("h3", { text: "Write a row of attention" }),
      el("p", { class: "hint", text: "The original output is forced, and its tokens get new probabilities; what the model writes "
        + "freely stands beside it. Weights are shared out to sum to 1." }),
      el("div", { class: "controls" },
        field("Map", select(header.attention.map((one) => [one.name, attentionName(one)]), attention.name,
          (name) => pick(name, head, query))),
        field("Head", select([["all", "all heads"], ...Array.from({ length: attention.heads }, (_, i) => [i, `head ${i + 1}`])],
          head ?? "all", (value) => pick(attention.name, value, query))),
        field("Row of", select(queryNames.map((label, q) => [q, `${q + 1}: ${label}`]), query,
          (value) => pick(attention.name, head, value)))),
      el("div", { class: "row-sliders", role: "group", aria: { label: `Where ${queryNames[query]} looks` } }, sliders),
      el("p", { class: "quiet", hidden: !many, text: `The first ${MOST_KEYS} of ${free.length} tokens have sliders.` }),
      el("p", { class: "quiet", hidden: !hidden, text: `${hidden} tokens are masked for this one: it may not see them.` }),
      el("div", { class: "row" },
        field("Everything on", onlyAt),
        button("Evenly", () => put(() => 1 / free.length)),
        button("As recorded", () => {
          write(row, null);
          refresh();
        })),
    );
  }

  return { element, refresh };
}

/** One recorded row: a head's, or the mean of all heads'. */
async function rowWeights(trace, attention, head, query) {
  const tensor = await trace.array(attention.array);
  const { values, scale } = headWeights(tensor, head ?? "mean");
  const keys = tensor.shape[2];
  return Float32Array.from(values.subarray(query * keys, (query + 1) * keys), (weight) => weight * scale);
}

function changeText(header, change) {
  if (change.kind === "word") return `“${visible(header.tokens[change.side]?.[change.token]?.piece.trim() ?? "?")}” hidden`;
  const attention = header.attention.find((one) => one.name === change.attention);
  const name = attention ? attentionName(attention) : change.attention;
  const head = change.head === null ? "all heads" : `head ${change.head + 1}`;
  return change.kind === "head" ? `${name}, ${head} off` : `${name}, ${head}: row ${change.query + 1} by hand`;
}

function showMade(place, context) {
  const list = changeList(context.state);
  clear(place).append(
    el("span", { class: "quiet", text: list.length ? "Changed:" : "Nothing is changed yet." }),
    ...list.map((change) => {
      const text = changeText(context.trace.header, change);
      const without = () => setChanges(context.state, list.filter((other) => other !== change));
      return button(`${text} ×`, without, { class: "chip", aria: { label: `Take back: ${text}` } });
    }),
    list.length > 1 ? button("Take all back", () => setChanges(context.state, [])) : "",
  );
}

/** The places of what the model wrote itself. */
const writtenPlaces = (tokens) => tokens.map((_, i) => i).filter((i) => !tokens[i].given);
const totalAt = (numbers, places) => places.reduce((sum, i) => sum + numbers[i], 0);

/** What the original output was worth before and with the change, and in words what the changed model says. */
function changeFacts(header, changed) {
  const places = writtenPlaces(header.tokens.target);
  const before = totalAt((changed?.before ?? header.output).logp, places);
  if (!changed) return { places, before };
  const free = changed.forced ? changed.free : { text: changed.text.target, logp: changed.text.logp };
  return { places, before, held: totalAt(changed.held.logp, places), free, same: free?.text === header.text.target };
}

function showResults(place, context, changed) {
  const { header } = context.trace;
  const { places, before, held, free, same } = changeFacts(header, changed);
  const [was, now] = [(changed?.before ?? header.output).p, (changed?.held ?? header.output).p];
  const labels = tokenLabels(header.tokens.target);
  const told = `Log-probability of the whole: ${exactNumber(before)}`;
  clear(place).append(
    el("div", { class: "outputs" },
      outputCard("original", "Original", header.text.target, before),
      changed?.forced ? outputCard("forced", "Changed, original output forced", changed.text.target, held, "forced") : null,
      free ? outputCard("changed", changed.forced ? "Changed, free output (greedy)" : "Changed", free.text, free.logp,
        same ? "says the same" : "says something else") : null),
    barFigure(context, {
      title: "How likely the original output is",
      note: changed ? `${told} before, ${exactNumber(held)} with the change (${signedNumber(held - before)}).` : `${told}.`,
      rows: places.map((i) => ({
        label: labels[i], value: now[i], was: changed ? was[i] : undefined,
        said: changed ? `${percent(was[i])} → ${percent(now[i])}` : percent(was[i]),
      })),
      columns: ["token", "before", "with the change", "difference"],
      cells: (row, n) => {
        const [p, q] = [was[places[n]], now[places[n]]];
        return [row.label, p.toFixed(4), q.toFixed(4), signedNumber(q - p)];
      },
      key: changed ? [["now", "with the change"], ["was", "before"]] : [],
      name: "changes",
    }),
  );
}

function outputCard(kind, title, text, logp, remark = "") {
  return el("div", { class: "card", data: { output: kind } },
    el("h3", { text: title }),
    el("p", { class: "output-said", dir: "auto", text: text.trim() || "∅" }),
    el("p", { class: "quiet num", text: `log-probability ${exactNumber(logp)}${remark ? ` · ${remark}` : ""}` }));
}

function changeSummary(header, changed) {
  if (!changed) return `No change: ${header.text.target}`;
  const { before, held, free, same } = changeFacts(header, changed);
  const says = !free ? "The output is forced" : same ? "The output stays the same" : `It now says: ${free.text}`;
  return `${says}. Log-probability of the original ${exactNumber(before)} before, ${exactNumber(held)} with the change.`;
}

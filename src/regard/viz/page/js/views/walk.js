// The walkthrough: a text on its way through the model, stage by stage, until the next token is chosen.
import { button, clear, el } from "../dom.js";
import { innerContext } from "../figure.js";
import { walkStages } from "../stages.js";
import { anyOf, listIn } from "../state.js";
import { tokenStrip } from "../token_strip.js";
import { tokenLabels } from "../tokens.js";

export const walk = {
  id: "walk",
  title: "Walkthrough",
  about: "One input on its way through the model, stage by stage, until the next token is chosen and appended.",
  lacking: "There is no input to follow yet: type a text above.",
  needs: (header) => header !== null && header.axes.inputs.elements.length > 0,
  async render(root, context) {
    const walkthrough = makeWalkthrough(context);
    root.append(walkthrough.element);
    const stop = context.state.subscribe((changed) => walkthrough.follow(changed));
    await walkthrough.begin();
    return stop;
  },
};

/** The field of the address with the selected token of a side. */
const selectionField = (side) => (side === "source" ? "word" : "token");

/** Holds the trace that is shown, the stage, and the selected token of each side. */
function makeWalkthrough(context) {
  const { state } = context;
  const rail = el("ol", { class: "walk-rail", role: "tablist", aria: { label: "Stages", orientation: "vertical" } });
  const strip = el("div", { class: "walk-strip" });
  const panel = el("div", { class: "walk-panel stack", role: "tabpanel", id: "walk-panel", tabIndex: 0 });
  const element = el("div", { class: "walk" }, rail, el("div", { class: "stack" }, strip, panel));
  let trace = context.trace;
  let stages = walkStages(trace.header);
  let [draws, endPictures] = [0, () => {}];

  const stage = () => stages.find((one) => one.id === state.get("stage")) ?? stages[0];
  const selection = { trace: () => trace, position, append, generatedIds };

  /** The selected position of a side; by default the last input token before the first generated one. */
  function position(side) {
    const tokens = trace.header.axes[side].elements;
    const generated = trace.header.axes.target.elements.findIndex((token) => !token.given);
    const usual = side === "source" ? 0 : generated < 0 ? tokens.length - 1 : generated;
    const wanted = state.get(selectionField(side));
    return Math.max(0, Math.min(wanted === "" ? usual : Number(wanted) || 0, tokens.length - 1));
  }

  function go(id) {
    state.set({ stage: id }, { push: true });
  }

  /** The ids generated before the selected position: those appended here, and those of the recorded output. */
  function generatedIds() {
    const recorded = trace.header.axes.target.elements.slice(0, position("inputs")).filter((token) => !token.given);
    return [...listIn(state, "continuation"), ...recorded.map((token) => token.id)];
  }

  /** Appends a token after the selected position: along the recorded text, or in a new trace where it differs. */
  async function append(id) {
    const [target, inputs] = ["target", "inputs"].map((side) => trace.header.axes[side].elements);
    const at = position("inputs");
    if (target[at]?.id === id && at + 1 < inputs.length) {
      state.set({ token: at + 1 });
      return;
    }
    const ids = [...generatedIds(), id];
    await context.source.trace({ ...context.request, continue: ids }); // fails where nothing can follow
    state.set({ continuation: JSON.stringify(ids), token: null });
  }

  async function load() {
    const ids = listIn(state, "continuation");
    trace = context.trace;
    try {
      if (ids.length) trace = await context.source.trace({ ...context.request, continue: ids });
    } catch (error) {
      context.failed(error);
    }
    stages = walkStages(trace.header);
  }

  function drawRail() {
    const current = stage();
    const hadFocus = rail.contains(document.activeElement);
    const tabs = stages.map((one, i) => {
      const tab = button(one.title, () => go(one.id), {
        class: "walk-tab",
        role: "tab",
        tabIndex: one === current ? 0 : -1,
        aria: { selected: String(one === current), controls: "walk-panel" },
        on: { keydown: (event) => moveTab(event, i) },
      });
      if (hadFocus && one === current) queueMicrotask(() => tab.focus());
      return el("li", { role: "presentation" }, tab);
    });
    clear(rail).append(...tabs);
    scrollTo(rail, rail.querySelector("[aria-selected=true]"));
  }

  function moveTab(event, i) {
    const to = { ArrowDown: i + 1, ArrowRight: i + 1, ArrowUp: i - 1, ArrowLeft: i - 1, Home: 0, End: stages.length - 1 };
    if (!(event.key in to)) return;
    event.preventDefault();
    go(stages[(to[event.key] + stages.length) % stages.length].id);
  }

  async function draw() {
    const mine = (draws += 1);
    const current = stage();
    drawRail();
    const hadFocus = strip.contains(document.activeElement);
    clear(strip);
    if (current.side) strip.append(selectionStrip(context, trace.header, current.side, position(current.side)));
    const selected = strip.querySelector("[aria-pressed=true]");
    scrollTo(selected?.parentElement, selected);
    if (hadFocus) selected?.focus();
    const content = el("div", { class: "stack" });
    const pictures = innerContext(context);
    try {
      await current.show(content, pictures.context, selection);
    } catch (error) {
      content.append(el("p", { class: "note", role: "alert", text: error.message }));
    }
    if (mine !== draws) return pictures.end();
    const focused = panel.contains(document.activeElement) ? (document.activeElement.dataset.act ?? "") : null;
    const n = stages.indexOf(current);
    clear(panel).append(
      el("h3", { class: "walk-title", text: `${n + 1}. ${current.title}` }),
      el("p", { class: "quiet", text: current.about }),
      content,
      el(
        "div",
        { class: "row walk-steps" },
        button("← Back", () => go(stages[n - 1].id), { disabled: n === 0, data: { act: "back" } }),
        n + 1 < stages.length
          ? button("Next →", () => go(stages[n + 1].id), { class: "main", data: { act: "next" } })
          : button("Back to the tokens", () => go("tokens")),
      ),
    );
    panel.setAttribute("aria-label", current.title);
    endPictures();
    endPictures = pictures.end;
    scrollTo(panel.querySelector(".scroller"), panel.querySelector("thead .selected"));
    if (focused !== null) (panel.querySelector(`[data-act="${focused}"]`) ?? panel).focus({ preventScroll: true });
  }

  async function follow(changed) {
    if (anyOf(changed, "run", "text", "step")) {
      const stale = ["continuation", "token", "word"].filter((name) => !changed.has(name));
      state.set(Object.fromEntries(stale.map((name) => [name, null]))); // app.js draws the view again
      return;
    }
    if (changed.has("continuation")) await load();
    if (anyOf(changed, "continuation", "stage", "token", "word", "head")) await draw();
    if (changed.has("stage")) {
      if (strip.parentElement.getBoundingClientRect().top < 0) strip.parentElement.scrollIntoView();
      context.announce(`Stage ${stages.indexOf(stage()) + 1} of ${stages.length}: ${stage().title}`);
    }
  }

  async function begin() {
    await load();
    await draw();
  }

  return { element, follow, begin };
}

/** Scrolls a container, and nothing around it, to show one of its children. */
function scrollTo(container, child) {
  if (!container || !child) return;
  const [outer, inner] = [container.getBoundingClientRect(), child.getBoundingClientRect()];
  container.scrollLeft += (inner.left + inner.right - outer.left - outer.right) / 2;
  container.scrollTop += (inner.top + inner.bottom - outer.top - outer.bottom) / 2;
}

/** The tokens of a side in a line; a click selects one. */
function selectionStrip(context, header, side, at) {
  const tokens = tokenLabels(header.axes[side].elements);
  const strip = tokenStrip({
    label: "Selected token",
    tokens,
    onPick: (i) => context.state.set({ [selectionField(side)]: i }),
    announce: context.announce,
    describe: (i) => `${tokens[i]}, token ${i + 1} of ${tokens.length}`,
  });
  strip.mark(at);
  return el("div", { class: "selection" }, el("span", { class: "quiet", text: "Token" }), strip.element);
}

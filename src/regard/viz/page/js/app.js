// The application: the input, the output, and one view of how the model got from one to the other.

import { button, clear, debounce, el, field, segmented, select } from "./dom.js";
import { weightOptions } from "./attention_map.js";
import { setAnchors } from "./colours.js";
import { percent, plural, shortNumber } from "./numbers.js";
import { CAUTION, captionLines } from "./figure.js";
import { embeddedSource, liveSource, requestKey } from "./source.js";
import { saveHtml, savePng, saveSvg } from "./export.js";
import { anyOf, makeState } from "./state.js";
import { direction } from "./tokens.js";
import { overlay } from "./views/overlay.js";
import { align } from "./views/align.js";
import { heads } from "./views/heads.js";
import { compare } from "./views/compare.js";
import { walk } from "./views/walk.js";
import { changes } from "./views/changes.js";
import { explain } from "./views/explain.js";
import { positions } from "./views/positions.js";

const VIEWS = [overlay, align, heads, compare, walk, changes, explain, positions];
const OUTPUT_NAMES = {
  translate: "Translation",
  generate: "Continuation",
  fill: "Filled masks",
  classify: "Class",
  predict: "Prediction",
  write: "Text",
  spell: "Text",
  decide: "Decisions",
};
const LONG_TEXT = 140; // characters; longer texts have a smaller font
const RELOADED = "The weights on disk have changed; the page now shows the new ones.";
const TYPING_PAUSE = 450; // milliseconds without typing before the model runs

const byId = (id) => document.getElementById(id);
const embeddedJson = (id) => (byId(id) ? JSON.parse(byId(id).textContent) : null);
const embedded = embeddedJson("regard-data");
const fileCopy = embedded ? `<!doctype html>\n${document.documentElement.outerHTML}` : "";
const source = embedded ? embeddedSource(embedded, embeddedJson("regard-answers") ?? {}, fileCopy) : liveSource();
const state = makeState(embedded?.hash ?? "");
const figures = new Set();
const usedRequests = new Map();

let runs = [];
let firstText = "";
let maxEmbedded = 16; // traces in one standalone file; set by the server
let trace = null;
let traceKey = "";
let viewShown = null; // view and trace that render() was last called for, so that nothing is drawn twice
let leave = () => {};
let loads = 0;
let failure = null; // why there is no trace
let reloaded = false; // after the weights have changed, until the next input

const announce = debounce((text) => {
  byId("live").textContent = text;
}, 150);

// ---- theme

const darkScreen = matchMedia("(prefers-color-scheme: dark)");

function theme() {
  const chosen = state.get("theme");
  return chosen === "light" || chosen === "dark" ? chosen : darkScreen.matches ? "dark" : "light";
}

function applyTheme() {
  document.documentElement.dataset.theme = theme();
  const other = theme() === "dark" ? "light" : "dark";
  const control = byId("theme");
  if (control) {
    control.textContent = other === "dark" ? "Dark" : "Light";
    control.setAttribute("aria-label", `Use ${other} colours`);
  }
  dispatchEvent(new Event("regard-theme"));
}

// ---- tools

function buildTools() {
  const options = [["0", "Pictures"], ["1", "Tables"]];
  const setTable = (value) => state.set({ table: value === "1" ? "1" : null });
  const asTables = segmented("Show as", options, state.get("table", "0"), setTable);
  state.subscribe((changed) => {
    if (!changed.has("table")) return;
    for (const radio of asTables.querySelectorAll("input")) radio.checked = radio.value === state.get("table", "0");
  });
  const themeButton = button("", () => state.set({ theme: theme() === "dark" ? "light" : "dark" }), {
    id: "theme",
    class: "plain",
  });
  byId("tools").append(asTables, themeButton, exportMenu());
}

function exportMenu() {
  const menu = el("details", { class: "menu" }, el("summary", { text: "Export" }));
  const saving = (label, save) =>
    button(label, async () => {
      menu.open = false;
      try {
        await save();
        announce(`${label} saved`);
      } catch (error) {
        showError(error);
      }
    });
  const shown = () => [...figures];
  const requests = () => {
    const all = [...usedRequests.values()];
    return all.length > maxEmbedded ? [all[0], ...all.slice(1 - maxEmbedded)] : all; // the first, and the last ones
  };
  menu.append(
    el(
      "div",
      { class: "menu-list" },
      saving("SVG", () => saveSvg(shown())),
      saving("PNG", () => savePng(shown())),
      saving("HTML", () => saveHtml(source, requests(), state.link({}))),
    ),
  );
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    menu.open = false;
    menu.querySelector("summary").focus();
  });
  menu.addEventListener("focusout", (event) => {
    if (!menu.contains(event.relatedTarget)) menu.open = false;
  });
  return menu;
}

// ---- the composer

const currentRun = () => runs.find((run) => run.id === state.get("run")) ?? runs[0];

function currentRequest() {
  const run = currentRun();
  const step = state.get("step");
  const given = run === runs[0] || !run.examples.length ? firstText : ""; // on the command line
  const text = state.get("text") || given || run.example || "";
  const wanted = { run: run.id, step: step === "" ? null : Number(step), text, target: null, changes: [] };
  return source.live ? wanted : source.nearest(wanted);
}

/** The input after a change to another run: texts are kept, and what is no text only if it is an example there too. */
function keptText(run, id) {
  const [text, other] = [state.get("text"), runs.find((one) => one.id === id)];
  const kept = other.examples.length ? other.examples.includes(text) : !run.examples.length;
  return kept && text ? text : null;
}

/** The weights that can be chosen: all snapshots, or those that a standalone file has. */
function stepOptions(run) {
  return weightOptions(source.live ? [null, ...(run.snapshots ?? [])] : source.steps(run.id));
}

function buildComposer() {
  const run = currentRun();
  const request = currentRequest();
  const form = el("form", { class: "ask", on: { submit: (event) => event.preventDefault() } });
  const runChoice = select(
    runs.map(({ id, name }) => [id, name]),
    run.id,
    (id) => state.set({ run: id, step: null, text: keptText(run, id) }, { push: true }),
  );
  form.append(field("Model", runChoice, { class: "field field-run" }));
  const steps = stepOptions(run);
  const known = steps.some(([step]) => step === String(request.step ?? ""));
  if (!known) steps.push([String(request.step), `step ${request.step} (missing)`]);
  if (steps.length > 1) {
    const stepChoice = select(steps, request.step ?? "", (step) =>
      state.set({ step: step || null }, { push: true }),
    );
    form.append(field("Weights", stepChoice, { class: "field field-step" }));
  }
  if (run.examples.length > 1) {
    const known = run.examples.includes(request.text);
    const options = [...(known ? [] : [["", "choose one"]]), ...run.examples.map((text) => [text, text])];
    const choose = (text) => text && state.set({ text }, { push: true });
    const choice = select(options, known ? request.text : "", choose);
    form.append(field("Examples", choice, { class: "field field-example" }));
  }
  form.append(source.live ? textInput(request) : textChoice(request));
  clear(byId("composer")).append(form, el("div", { class: "answer", id: "answer" }));
  showOutput();
}

function textInput(request) {
  const box = el("textarea", { class: "sentence", rows: 1, spellcheck: false, dir: "auto" });
  box.value = request.text;
  let typing = false; // all that is typed until Enter or blur makes one entry of the history
  const submit = () => {
    if (!box.value.trim() || box.value === currentRequest().text) return;
    state.set({ text: box.value }, { push: !typing });
    typing = true;
  };
  const soon = debounce(submit, TYPING_PAUSE);
  const grow = () => {
    box.classList.toggle("long", box.value.length > LONG_TEXT);
    box.style.height = "auto";
    box.style.height = `${Math.min(box.scrollHeight + 2, 160)}px`;
  };
  box.addEventListener("input", (event) => {
    grow();
    if (!event.isComposing) soon();
  });
  box.addEventListener("compositionend", soon);
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
    typing = false;
  });
  box.addEventListener("blur", () => (typing = false));
  requestAnimationFrame(grow);
  return field(currentRun().examples.length ? "Input" : "Text", box, { class: "field field-text" });
}

/** The texts of a standalone file. */
function textChoice(request) {
  const texts = source.texts(request.run);
  const choice = select(
    texts.map((text) => [text, text]),
    request.text,
    (text) => state.set({ text }, { push: true }),
    { class: "sentence" },
  );
  return field("Text", choice, { class: "field field-text" });
}

function showOutput(error = null) {
  const answer = byId("answer");
  if (!answer) return;
  clear(answer);
  if (error) {
    answer.append(el("p", { class: "callout", role: "alert", text: error.message }));
    if (trace) answer.append(el("p", { class: "hint", text: "The views below show the previous input." }));
    return;
  }
  if (!trace) return;
  const { header } = trace;
  const { text, model, axes } = header;
  const output = el("p", {
    class: text.target.length > LONG_TEXT ? "output long" : "output",
    dir: direction(text.target),
    lang: "",
    text: text.target || "(empty)",
  });
  const facts = [
    header.output.p.length === 1 && !Number.isFinite(text.score) ? `probability ${percent(header.output.p[0])}` : null,
    Number.isFinite(text.score) ? `score ${shortNumber(text.score)}` : null,
    inputSize(axes),
    text.cut ? "input truncated to the model's maximum length" : null,
    model.step === null ? null : `step ${model.step}`,
    model.parameters ? `${counted(model.parameters)} parameters` : null,
  ];
  answer.append(
    el("span", { class: "output-name", text: OUTPUT_NAMES[model.task] ?? "Output" }),
    output,
    el("p", { class: "quiet facts num", text: facts.filter(Boolean).join(" · ") }),
    reloaded ? el("p", { class: "note", text: RELOADED }) : "",
    source.live ? "" : el("p", { class: "hint caption", text: captionLines(trace.header).join(" · ") }),
  );
}

/** A count in thousands or millions. */
const counted = (count) =>
  count < 1e5 ? `${(count / 1e3).toFixed(0)} k` : `${(count / 1e6).toFixed(count < 1e7 ? 1 : 0)} M`;

/** What the input consists of: "7 input tokens", "36 patches". */
function inputSize(axes) {
  const read = axes.source.elements.length ? axes.source : axes.inputs;
  if (read.kind === "steps") return plural(read.steps.length, "step");
  if (read.kind !== "tokens") return `${read.elements.length} ${read.kind}`;
  const given = axes.source.elements.length || axes.target.elements.filter((token) => token.given).length;
  return `${given} input tokens`;
}

// ---- views

function applies(view) {
  return view.needs(trace?.header ?? null);
}

function currentView() {
  const chosen = VIEWS.find((view) => view.id === state.get("view"));
  return chosen ?? VIEWS.find(applies) ?? VIEWS[0];
}

/** The views to choose from. */
const listedViews = () => VIEWS.filter((view) => !view.optional || applies(view) || view === currentView());

function buildNavigation() {
  const shown = currentView();
  const listed = listedViews();
  const links = listed.map((view) => {
    const href = state.link({ view: view.id });
    const link = el("a", { href, data: { view: view.id }, text: view.title, class: applies(view) ? null : "unavailable" });
    if (view === shown) link.setAttribute("aria-current", "page");
    return link;
  });
  const strip = byId("views");
  const focused = [...strip.children].indexOf(document.activeElement);
  clear(strip).append(...links);
  if (focused >= 0) links[focused].focus();
  const link = links[listed.indexOf(shown)]; // scrollIntoView would also move the starting point of the Tab key
  const [left, right] = [link.offsetLeft - strip.offsetLeft, link.offsetLeft - strip.offsetLeft + link.offsetWidth];
  if (left < strip.scrollLeft || right > strip.scrollLeft + strip.clientWidth) strip.scrollLeft = left - 24;
}

/** Updates links after a change of the state, so that another view opens on the same run, text and layer. */
function refreshLinks() {
  for (const link of document.querySelectorAll("a[data-view]")) link.href = state.link({ view: link.dataset.view });
}

function showError(error) {
  if (error?.name === "AbortError" || error?.status === 409) return; // after 409 everything is drawn again
  const message = el("p", { class: "callout", role: "alert", text: error?.message ?? String(error) });
  const old = byId("main").querySelector(".callout[role=alert]");
  if (old) old.replaceWith(message);
  else byId("main").append(message);
}

/** A link to another view on the same input. */
function viewLink(id, text) {
  return el("a", { href: state.link({ view: id }), data: { view: id }, text });
}

async function show() {
  const view = currentView();
  leave();
  const ending = new AbortController();
  viewShown = `${view.id} ${traceKey}`;
  figures.clear();
  usedRequests.clear();
  const main = byId("main");
  delete main.dataset.ready;
  clear(main);
  document.title = `${view.title} · regard`;
  buildNavigation();
  buildFoot();
  const root = el("div", { class: "view", id: `view-${view.id}` });
  main.append(
    el("div", { class: "view-head" }, el("h2", { text: view.title }), el("p", { class: "quiet", text: view.about })),
    root,
  );
  if (trace) usedRequests.set(traceKey, trace.request);
  let cleanup = () => {};
  leave = () => {
    ending.abort();
    cleanup?.();
  };
  if (applies(view)) {
    try {
      cleanup = await view.render(root, makeContext(ending.signal));
    } catch (error) {
      showError(error);
    }
  } else {
    root.append(el("p", { class: "callout", text: trace || !failure ? view.lacking : `There is nothing to show: ${failure}` }));
  }
  if (ending.signal.aborted) {
    cleanup?.();
    return;
  }
  await drawn();
  if (!ending.signal.aborted) main.dataset.ready = view.id;
}

/** Resolves when heat maps have been drawn: they draw on their first resize, in the next frame. */
function drawn() {
  return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
}

function makeContext(signal) {
  return {
    source: {
      ...source,
      trace(request) {
        const key = requestKey(request);
        if (key !== traceKey) usedRequests.delete(key); // so that it becomes the last one
        usedRequests.set(key, request);
        return source.trace(request);
      },
    },
    state: { ...state, subscribe: (listener) => subscribeUntil(signal, listener) },
    trace,
    request: trace?.request ?? currentRequest(),
    runs,
    run: runs.find((run) => run.id === trace?.request.run) ?? currentRun(),
    announce,
    theme,
    signal,
    figures,
    failed: showError,
    viewLink,
  };
}

function subscribeUntil(signal, listener) {
  const stop = state.subscribe(listener);
  signal.addEventListener("abort", stop);
  return stop;
}

/** Requests the trace that the address names, then shows the view; the last request wins. */
async function load() {
  const request = currentRequest();
  const key = requestKey(request);
  const mine = ++loads;
  if (key !== traceKey || !trace) {
    byId("main").setAttribute("aria-busy", "true");
    try {
      const answer = await source.trace(request);
      if (mine !== loads) return;
      trace = answer;
      traceKey = key;
      showOutput();
      const texts = [reloaded && RELOADED, trace.header.text.target].filter(Boolean);
      if (texts.length) announce(texts.join(" "));
      reloaded = false;
    } catch (error) {
      if (mine !== loads) return;
      failure = error.message;
      showOutput(error); // the views keep showing the previous input
    } finally {
      if (mine === loads) byId("main").removeAttribute("aria-busy");
    }
  }
  if (viewShown !== `${currentView().id} ${traceKey}`) await show();
}

/** Ends the view and requests everything again, after the weights on disk have changed. */
function reload() {
  leave();
  leave = () => {};
  [trace, traceKey, viewShown, reloaded] = [null, "", null, true];
  load();
}

/** The caution, with links to the views that measure what the output depends on, as far as they apply. */
function buildFoot() {
  const links = [explain, changes].filter(applies);
  const named = links.flatMap(({ id, title }, i) => [i ? " or " : "", viewLink(id, title)]);
  const advice = links.length ? [" To measure what the output depends on, see ", ...named, "."] : [];
  clear(byId("foot")).append(el("p", {}, CAUTION, ...advice));
}

async function begin() {
  if (source.live && location.search) history.replaceState(null, "", location.pathname + location.hash); // the token
  applyTheme();
  darkScreen.addEventListener("change", applyTheme);
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault();
    byId("main").focus();
  });
  document.addEventListener("click", followLink);
  try {
    const answer = await source.runs();
    runs = answer.runs;
    setAnchors(answer.colours.anchors);
    firstText = answer.text ?? "";
    maxEmbedded = answer.limits?.requests ?? maxEmbedded;
  } catch (error) {
    return showError(error);
  }
  addEventListener("regard-weights", reload);
  buildTools();
  applyTheme();
  buildComposer();
  buildNavigation();
  state.subscribe((changed) => {
    refreshLinks();
    if (changed.has("theme")) applyTheme();
    if (changed.has("run") || (changed.has("text") && !source.live)) buildComposer();
    updateComposer(changed);
    if (anyOf(changed, "view", "run", "step", "text")) load();
  });
  await load();
}

/** Follows links of the page by script: in a notebook's frame they would point at the notebook. */
function followLink(event) {
  const link = event.target.closest?.("a[href^='#']");
  if (!link || event.defaultPrevented || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  state.follow(link.getAttribute("href"));
}

/** Updates the composer after the Back button or a link has changed the address. */
function updateComposer(changed) {
  const box = byId("composer").querySelector("textarea");
  if (changed.has("text") && box && box.value.trim() !== currentRequest().text.trim())
    box.value = currentRequest().text;
  const examples = byId("composer").querySelector(".field-example select");
  if (changed.has("text") && examples) examples.value = currentRequest().text; // none, if it is no example
  if (changed.has("step")) {
    const choice = byId("composer").querySelector(".field-step select");
    if (choice) choice.value = state.get("step");
  }
}

begin();

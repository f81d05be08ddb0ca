// The shell: what the model reads, what it says, and one view of how it got there.

import { button, clear, debounce, el, field, segmented, select } from "./dom.js";
import { setAnchors } from "./colours.js";
import { shortNumber } from "./chart.js";
import { captionLines } from "./figure.js";
import { embeddedSource, liveSource, requestKey } from "./source.js";
import { saveHtml, savePng, saveSvg } from "./export.js";
import { makeState } from "./state.js";
import { direction } from "./tokens.js";
import { align } from "./views/align.js";
import { heads } from "./views/heads.js";
import { compare } from "./views/compare.js";
import { walk } from "./views/walk.js";
import { changes } from "./views/changes.js";
import { explain } from "./views/explain.js";
import { positions } from "./views/positions.js";

const VIEWS = [align, heads, compare, walk, changes, explain, positions];
const ANSWERS = { translate: "Translation", generate: "Continuation", fill: "Filled in", classify: "Class" };
const LONG_TEXT = 140; // characters, from which on text is set smaller
const RENEWED = "The weights on disk have changed: all that is shown here is of the new ones.";
const TYPING_PAUSE = 450; // milliseconds of quiet before the model is asked

const place = (id) => document.getElementById(id);
const laidIn = (id) => (place(id) ? JSON.parse(place(id).textContent) : null);
const carriedData = laidIn("regard-data");
const fileCopy = carriedData ? `<!doctype html>\n${document.documentElement.outerHTML}` : "";
const source = carriedData ? embeddedSource(carriedData, laidIn("regard-answers") ?? {}, fileCopy) : liveSource();
const state = makeState(carriedData?.hash ?? "");
const figures = new Set();
const usedRequests = new Map();

let runs = [];
let firstText = "";
let mostInFile = 16; // traces; the server says how many it lays into one file
let trace = null;
let traceKey = "";
let viewShown = null; // what render() was last called for, so that a late answer draws nothing twice
let leave = () => {};
let asked = 0;
let failure = null; // why there is no trace
let renewed = false; // by itself, until another text is asked for

const announce = debounce((text) => {
  place("live").textContent = text;
}, 150);

// ---- theme

const darkScreen = matchMedia("(prefers-color-scheme: dark)");

function theme() {
  const chosen = state.get("theme");
  return chosen === "light" || chosen === "dark" ? chosen : darkScreen.matches ? "dark" : "light";
}

function dress() {
  document.documentElement.dataset.theme = theme();
  const other = theme() === "dark" ? "light" : "dark";
  const control = place("theme");
  if (control) {
    control.textContent = other === "dark" ? "Dark" : "Light";
    control.setAttribute("aria-label", `Use ${other} colours`);
  }
  dispatchEvent(new Event("regard-theme"));
}

// ---- tools

function buildTools() {
  const asTables = segmented(
    "Show as",
    [
      ["0", "Pictures"],
      ["1", "Tables"],
    ],
    state.get("table", "0"),
    (value) => state.set({ table: value === "1" ? "1" : null }),
  );
  state.subscribe((changed) => {
    if (!changed.has("table")) return;
    for (const radio of asTables.querySelectorAll("input")) radio.checked = radio.value === state.get("table", "0");
  });
  const themeButton = button("", () => state.set({ theme: theme() === "dark" ? "light" : "dark" }), {
    id: "theme",
    class: "plain",
  });
  place("tools").append(asTables, themeButton, exportMenu());
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
        complain(error);
      }
    });
  const shown = () => [...figures];
  const requests = () => {
    const all = [...usedRequests.values()];
    return all.length > mostInFile ? [all[0], ...all.slice(1 - mostInFile)] : all; // of very many, the last ones
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
  const text = state.get("text") || firstText || run.example || "";
  const wanted = { run: run.id, step: step === "" ? null : Number(step), text, target: null, changes: [] };
  return source.live ? wanted : source.nearest(wanted);
}

/** The moments of training that can be looked at: all snapshots, or those that a standalone file carries. */
function stepOptions(run) {
  const steps = source.live ? [null, ...(run.snapshots ?? [])] : source.steps(run.id);
  return steps.map((step) => [step === null ? "" : String(step), step === null ? "best" : `step ${step}`]);
}

function buildComposer() {
  const run = currentRun();
  const request = currentRequest();
  const form = el("form", { class: "ask", on: { submit: (event) => event.preventDefault() } });
  const runChoice = select(
    runs.map(({ id, name }) => [id, name]),
    run.id,
    (id) => state.set({ run: id, step: null }, { push: true }),
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
  form.append(source.live ? typedText(request) : recordedText(request));
  clear(place("composer")).append(form, el("div", { class: "answer", id: "answer" }));
  tellAnswer();
}

function typedText(request) {
  const box = el("textarea", { class: "sentence", rows: 1, spellcheck: false, dir: "auto" });
  box.value = request.text;
  let typing = false; // one entry of the history for all that is typed before the box is left, or Enter is pressed
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
  return field("Text", box, { class: "field field-text" });
}

/** A standalone file offers the sentences it carries. */
function recordedText(request) {
  const texts = source.texts(request.run);
  const choice = select(
    texts.map((text) => [text, text]),
    request.text,
    (text) => state.set({ text }, { push: true }),
    { class: "sentence" },
  );
  return field("Text", choice, { class: "field field-text" });
}

function tellAnswer(error = null) {
  const answer = place("answer");
  if (!answer) return;
  clear(answer);
  if (error) {
    answer.append(el("p", { class: "callout", role: "alert", text: error.message }));
    if (trace) answer.append(el("p", { class: "hint", text: "Below is still the last text that could be read." }));
    return;
  }
  if (!trace) return;
  const { text, model, tokens } = trace.header;
  const said = el("p", {
    class: text.target.length > LONG_TEXT ? "said long" : "said",
    dir: direction(text.target),
    lang: "",
    text: text.target || "(nothing)",
  });
  const facts = [
    Number.isFinite(text.score) ? `score ${shortNumber(text.score)}` : null,
    `${tokens.source.length || tokens.target.filter((token) => token.given).length} tokens in`,
    text.cut ? "the text was cut: this model reads no more at once" : null,
    model.step === null ? null : `step ${model.step}`,
    model.parameters ? `${(model.parameters / 1e6).toFixed(model.parameters < 1e7 ? 1 : 0)} M parameters` : null,
  ];
  answer.append(
    el("span", { class: "verb", text: ANSWERS[model.task] ?? "Answer" }),
    said,
    el("p", { class: "quiet facts num", text: facts.filter(Boolean).join(" · ") }),
    renewed ? el("p", { class: "note", text: RENEWED }) : "",
    source.live ? "" : el("p", { class: "hint caption", text: captionLines(trace.header).join(" · ") }),
  );
}

// ---- views

function fits(view) {
  return view.needs(trace?.header ?? null);
}

function currentView() {
  const chosen = VIEWS.find((view) => view.id === state.get("view"));
  return chosen ?? VIEWS.find(fits) ?? VIEWS[0];
}

function buildNavigation() {
  const shown = currentView();
  const links = VIEWS.map((view) => {
    const link = el("a", { href: state.link({ view: view.id }), text: view.title, class: fits(view) ? null : "unfit" });
    if (view === shown) link.setAttribute("aria-current", "page");
    return link;
  });
  const strip = place("views");
  const focused = [...strip.children].indexOf(document.activeElement);
  clear(strip).append(...links);
  if (focused >= 0) links[focused].focus();
  const link = links[VIEWS.indexOf(shown)]; // scrollIntoView would also move where the Tab key begins
  const [left, right] = [link.offsetLeft - strip.offsetLeft, link.offsetLeft - strip.offsetLeft + link.offsetWidth];
  if (left < strip.scrollLeft || right > strip.scrollLeft + strip.clientWidth) strip.scrollLeft = left - 24;
}

/** Links follow every change of the state, so that another view opens on the same run, text and layer. */
function refreshLinks() {
  [...place("views").children].forEach((link, i) => {
    link.href = state.link({ view: VIEWS[i].id });
  });
  for (const link of document.querySelectorAll("a[data-view]")) link.href = state.link({ view: link.dataset.view });
}

function complain(error) {
  if (error?.name === "AbortError" || error?.status === 409) return; // with other weights all is drawn anew
  const said = el("p", { class: "callout", role: "alert", text: error?.message ?? String(error) });
  const old = place("main").querySelector(".callout[role=alert]");
  if (old) old.replaceWith(said);
  else place("main").append(said);
}

/** The address of another view on the same input. */
function viewLink(id, text) {
  return el("a", { href: state.link({ view: id }), data: { view: id }, text });
}

async function show() {
  const view = currentView();
  leave();
  const ending = new AbortController();
  const shownKey = `${view.id} ${traceKey}`;
  viewShown = shownKey;
  figures.clear();
  usedRequests.clear();
  const main = place("main");
  delete main.dataset.ready;
  clear(main);
  document.title = `${view.title} · regard`;
  buildNavigation();
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
  if (fits(view)) {
    try {
      cleanup = await view.render(root, makeContext(ending.signal));
    } catch (error) {
      complain(error);
    }
  } else {
    root.append(el("p", { class: "callout", text: trace || !failure ? view.lacking : `Nothing to show: ${failure}` }));
  }
  if (ending.signal.aborted) {
    cleanup?.();
    return;
  }
  await drawn();
  if (!ending.signal.aborted) main.dataset.ready = view.id;
}

/** Maps draw themselves when they are given their room: between the next frame and the one after it. */
function drawn() {
  return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
}

function makeContext(signal) {
  return {
    source: {
      ...source,
      trace(request) {
        const key = requestKey(request);
        if (key !== traceKey) usedRequests.delete(key); // to the end, where the last ones stand
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
    failed: complain,
    viewLink,
  };
}

function subscribeUntil(signal, listener) {
  const stop = state.subscribe(listener);
  signal.addEventListener("abort", stop);
  return stop;
}

/** Asks for the trace of what the address says, then shows the view; the last question wins. */
async function load() {
  const request = currentRequest();
  const key = requestKey(request);
  const mine = ++asked;
  if (key !== traceKey || !trace) {
    place("main").setAttribute("aria-busy", "true");
    try {
      const found = await source.trace(request);
      if (mine !== asked) return;
      trace = found;
      traceKey = key;
      tellAnswer();
      const said = [renewed && RENEWED, found.header.text.target].filter(Boolean);
      if (said.length) announce(said.join(" "));
      renewed = false;
    } catch (error) {
      if (mine !== asked) return;
      failure = error.message;
      tellAnswer(error); // the last text that could be read stays, and its views can be visited
    } finally {
      if (mine === asked) place("main").removeAttribute("aria-busy");
    }
  }
  if (viewShown !== `${currentView().id} ${traceKey}`) await show();
}

/** Some of what is shown has other weights by now: the view ends, and everything is asked for again. */
function renew() {
  leave();
  leave = () => {};
  [trace, traceKey, viewShown, renewed] = [null, "", null, true];
  load();
}

function buildFoot() {
  place("foot").append(
    el(
      "p",
      {},
      "Attention shows where a model looked. It is not by itself an explanation of what it said: ",
      "to see which words mattered, hide them, in ",
      viewLink("explain", "Explain"),
      " or ",
      viewLink("changes", "Interventions"),
      ".",
    ),
  );
}

async function begin() {
  if (source.live && location.search) history.replaceState(null, "", location.pathname + location.hash); // the token
  dress();
  darkScreen.addEventListener("change", dress);
  place("skip").addEventListener("click", (event) => {
    event.preventDefault();
    place("main").focus();
  });
  document.addEventListener("click", followLink);
  try {
    const told = await source.runs();
    runs = told.runs;
    setAnchors(told.colours.anchors);
    firstText = told.text ?? "";
    mostInFile = told.limits?.requests ?? mostInFile;
  } catch (error) {
    return complain(error);
  }
  addEventListener("regard-weights", renew);
  buildTools();
  dress();
  buildComposer();
  buildNavigation();
  buildFoot();
  state.subscribe((changed) => {
    refreshLinks();
    if (changed.has("theme")) dress();
    if (changed.has("run") || (changed.has("text") && !source.live)) buildComposer();
    followAddress(changed);
    if (["view", "run", "step", "text"].some((name) => changed.has(name))) load();
  });
  await load();
}

/** Links of the page are followed here: in a notebook's frame they would point at the notebook. */
function followLink(event) {
  const link = event.target.closest?.("a[href^='#']");
  if (!link || event.defaultPrevented || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  state.follow(link.getAttribute("href"));
}

/** The Back button and links change fields without the composer; it follows. */
function followAddress(changed) {
  const box = place("composer").querySelector("textarea");
  if (changed.has("text") && box && box.value.trim() !== currentRequest().text.trim())
    box.value = currentRequest().text;
  if (changed.has("step")) {
    const choice = place("composer").querySelector(".field-step select");
    if (choice) choice.value = state.get("step");
  }
}

begin();

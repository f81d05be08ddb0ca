// The walk: one text on its way through a model, a station at a time, until the next token is chosen; and again.
import { button, clear, el } from "../dom.js";
import { innerContext, listIn } from "../bits.js";
import { tokenStrip } from "../strip.js";
import { tokenLabels } from "../tokens.js";
import { walkStations } from "../stations.js";

export const walk = {
  id: "walk",
  title: "Walk",
  about: "One text on its way through the model, a station at a time, until the next token is chosen; and again.",
  lacking: "There is nothing to walk through yet: type a text above.",
  needs: (header) => header !== null && header.tokens.inputs.length > 0,
  async render(root, context) {
    const guide = walkGuide(context);
    root.append(guide.element);
    const stop = context.state.subscribe((changed) => guide.follow(changed));
    await guide.begin();
    return stop;
  },
};

/** The field of the address that says which token of a side is followed. */
const followField = (side) => (side === "source" ? "word" : "token");

/** Holds where the walk is: the trace it goes through, the station, and the token that is followed on each side. */
function walkGuide(context) {
  const { state } = context;
  const rail = el("ol", { class: "walk-rail", role: "tablist", aria: { label: "Stations", orientation: "vertical" } });
  const strip = el("div", { class: "walk-strip" });
  const panel = el("div", { class: "walk-panel stack", role: "tabpanel", id: "walk-panel", tabIndex: 0 });
  const element = el("div", { class: "walk" }, rail, el("div", { class: "stack" }, strip, panel));
  let trace = context.trace;
  let stations = walkStations(trace.header);
  let [turn, endPictures] = [0, () => {}];

  const station = () => stations.find((one) => one.id === state.get("station")) ?? stations[0];
  const place = { trace: () => trace, at, say, saidIds };

  /** The followed token of a side; of what is written, the one before the first that the model chose itself. */
  function at(side) {
    const tokens = trace.header.tokens[side];
    const { target } = trace.header.tokens;
    const chosen = target.findIndex((token) => !token.given);
    const usual = side === "source" ? 0 : chosen < 0 ? tokens.length - 1 : chosen;
    const wanted = state.get(followField(side));
    return Math.max(0, Math.min(wanted === "" ? usual : Number(wanted) || 0, tokens.length - 1));
  }

  function go(id) {
    state.set({ station: id }, { push: true });
  }

  /** The ids that were said so far, from what was taken by hand and what is recorded before the followed place. */
  function saidIds() {
    const taken = listIn(state, "said");
    const recorded = trace.header.tokens.target.slice(0, at("inputs")).filter((token) => !token.given);
    return [...taken, ...recorded.map((token) => token.id)];
  }

  /** Goes on with this token after the followed place: along the recorded text, or with a new trace where it differs. */
  async function say(id) {
    const { target, inputs } = trace.header.tokens;
    const row = at("inputs");
    if (target[row]?.id === id && row + 1 < inputs.length) {
      state.set({ token: row + 1 });
      return;
    }
    const said = [...saidIds(), id];
    await context.source.trace({ ...context.request, continue: said }); // refused where nothing can follow
    state.set({ said: JSON.stringify(said), token: null });
  }

  async function load() {
    const said = listIn(state, "said");
    trace = context.trace;
    try {
      if (said.length) trace = await context.source.trace({ ...context.request, continue: said });
    } catch (error) {
      context.failed(error);
    }
    stations = walkStations(trace.header);
  }

  function drawRail() {
    const here = station();
    const had = rail.contains(document.activeElement);
    clear(rail).append(...stations.map((one, i) => {
      const tab = button(one.title, () => go(one.id), {
        class: "walk-tab", role: "tab", tabIndex: one === here ? 0 : -1,
        aria: { selected: String(one === here), controls: "walk-panel" },
        on: { keydown: (event) => step(event, i) },
      });
      if (had && one === here) queueMicrotask(() => tab.focus());
      return el("li", { role: "presentation" }, tab);
    }));
    inView(rail, rail.querySelector("[aria-selected=true]"));
  }

  function step(event, i) {
    const to = { ArrowDown: i + 1, ArrowRight: i + 1, ArrowUp: i - 1, ArrowLeft: i - 1, Home: 0, End: stations.length - 1 };
    if (!(event.key in to)) return;
    event.preventDefault();
    go(stations[(to[event.key] + stations.length) % stations.length].id);
  }

  async function draw() {
    const own = (turn += 1);
    const here = station();
    drawRail();
    const side = here.side;
    const had = strip.contains(document.activeElement);
    clear(strip);
    if (side) strip.append(followStrip(context, trace.header, side, at(side)));
    const followed = strip.querySelector("[aria-pressed=true]");
    inView(followed?.parentElement, followed);
    if (had) followed?.focus();
    const content = el("div", { class: "stack" });
    const pictures = innerContext(context);
    try {
      await here.show(content, pictures.context, place);
    } catch (error) {
      content.append(el("p", { class: "note", role: "alert", text: error.message }));
    }
    if (own !== turn) return pictures.end();
    const act = panel.contains(document.activeElement) ? document.activeElement.dataset.act ?? "" : null;
    const n = stations.indexOf(here);
    clear(panel).append(
      el("h3", { class: "walk-title", text: `${n + 1}. ${here.title}` }),
      el("p", { class: "quiet", text: here.about }),
      content,
      el("div", { class: "row walk-steps" },
        button("← Back", () => go(stations[n - 1].id), { disabled: n === 0, data: { act: "back" } }),
        n + 1 < stations.length
          ? button("Next →", () => go(stations[n + 1].id), { class: "main", data: { act: "next" } })
          : button("Through the model again", () => go("tokens"))));
    panel.setAttribute("aria-label", here.title);
    endPictures();
    endPictures = pictures.end;
    inView(panel.querySelector(".scroller"), panel.querySelector("thead .followed"));
    if (act !== null) (panel.querySelector(`[data-act="${act}"]`) ?? panel).focus({ preventScroll: true });
  }

  async function follow(changed) {
    if (["run", "text", "step"].some((name) => changed.has(name))) {
      const left = ["said", "token", "word"].filter((name) => !changed.has(name)); // of another text
      state.set(Object.fromEntries(left.map((name) => [name, null]))); // the shell draws anew
      return;
    }
    if (changed.has("said")) await load();
    if (["said", "station", "token", "word", "head"].some((name) => changed.has(name))) await draw();
    if (changed.has("station")) {
      if (strip.parentElement.getBoundingClientRect().top < 0) strip.parentElement.scrollIntoView(); // its beginning
      const number = stations.indexOf(station()) + 1;
      context.announce(`Station ${number} of ${stations.length}: ${station().title}`);
    }
  }

  async function begin() {
    await load();
    await draw();
  }

  return { element, follow, begin };
}

/** Scrolls a line, and nothing around it, so that one of its parts is seen. */
function inView(line, part) {
  if (!line || !part) return;
  const [room, seen] = [line.getBoundingClientRect(), part.getBoundingClientRect()];
  line.scrollLeft += (seen.left + seen.right - room.left - room.right) / 2;
  line.scrollTop += (seen.top + seen.bottom - room.top - room.bottom) / 2;
}

/** The tokens of a side in a line; the one pressed is followed. */
function followStrip(context, header, side, at) {
  const tokens = tokenLabels(header.tokens[side]);
  const follow = (i) => context.state.set({ [followField(side)]: i });
  const line = tokenStrip({
    label: "Token to follow", tokens, onPick: follow, announce: context.announce,
    describe: (i) => `${tokens[i]}, token ${i + 1} of ${tokens.length}`,
  });
  line.mark(at);
  return el("div", { class: "follow" }, el("span", { class: "quiet", text: "Follow" }), line.element);
}

// A person is a black box too: things of any kind are sorted by asking whoever sits at the page, and questions counted.
import { button, clear, el, field } from "./dom.js";

const JUDGED_THINGS = "42, twenty, 7, three, two hundred, 100, a dozen";

export function judgePanel(context) {
  const things = el("input", { type: "text", value: context.state.get("things", JUDGED_THINGS), class: "wide" });
  const place = el("div", { class: "judge-place", aria: { live: "polite" } });
  const start = button("Sort by asking me", () => ask({ things: judgedThings(things.value), answers: [] }));
  things.addEventListener("change", () =>
    context.state.set({ things: things.value === JUDGED_THINGS ? null : things.value }),
  );

  async function ask(request) {
    try {
      const answer = await context.source.judge(request, context.signal);
      if (answer.sorted) {
        showSorted(place, answer);
        start.focus();
      } else showQuestion(place, request, answer, ask);
    } catch (error) {
      if (!context.signal.aborted) clear(place).append(el("p", { class: "note", text: error.message }));
    }
  }

  return el(
    "section",
    { class: "card stack judge", aria: { label: "You as the judge" } },
    el("h3", { text: "A person is a black box too" }),
    el("p", {
      class: "quiet",
      text:
        "Whoever can say which of two things comes first can sort them, even where no program knows how to " +
        "compare them. The price is counted in questions. Here the judge is you.",
    }),
    el("div", { class: "controls" }, field("Things, with commas between", things), start),
    place,
  );
}

function judgedThings(text) {
  return text
    .split(",")
    .map((thing) => thing.trim())
    .filter(Boolean);
}

/** The judge is asked whether `a` comes before `b`; an answer goes back with all those before it. */
function showQuestion(place, request, { ask: [a, b], questions, most }, answered) {
  const reply = (yes) => answered({ ...request, answers: [...request.answers, yes] });
  const choice = (thing, yes) => button(String(thing), () => reply(yes), { class: "judge-choice" });
  const first = choice(a, true);
  clear(place).append(
    el("p", { text: "Which comes first?" }),
    el("div", { class: "row" }, first, el("span", { class: "quiet", text: "or" }), choice(b, false)),
    el("p", { class: "quiet num", text: `Question ${questions + 1}, of ${most} at most.` }),
  );
  first.focus();
}

function showSorted(place, { sorted, questions }) {
  const cost = `It took ${questions} question${questions === 1 ? "" : "s"}.`;
  clear(place).append(
    el("p", { text: "In your order:" }),
    el(
      "ol",
      { class: "judge-order" },
      sorted.map((thing) => el("li", { text: String(thing) })),
    ),
    el("p", { class: "quiet num", data: { questions }, text: cost }),
  );
}

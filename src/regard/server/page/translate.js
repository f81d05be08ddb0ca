// The translation page: types in, translations out. Text reaches the document through textContent only.
import { parseGlossary, parseSrt } from "./formats.js";

const WAIT_MS = 250; // after the last key
const MAX_TEXTS = 256; // of a request
const UNSURE = 0.9, WRONG = 0.5; // confidence below which a word is underlined
const $ = (id) => document.getElementById(id);
let pending = null; // the request under way; a newer one cancels it
let timer = 0;
let last = null; // the translation shown, and its text
let opened = { name: "translation.txt", format: "text" };

async function call(body, signal) {
  const key = $("key").value;
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch("v1/translate", { method: "POST", headers, body: JSON.stringify(body), signal });
  const answer = await response.json();
  if (response.status === 401 || response.status === 403) $("key-field").hidden = false;
  if (!response.ok) throw new Error(answer.error?.message ?? answer.error ?? answer.detail ?? response.statusText);
  return answer.translations;
}

function request(q, more = {}) {
  const format = opened.format, glossary = parseGlossary($("glossary").value);
  const body = { q, alignment: true, confidence: true, format, glossary };
  if ($("model").value) body.model = $("model").value;
  return { ...body, ...more };
}

async function translate() {
  pending?.abort();
  const source = $("source").value;
  $("count").textContent = source ? `${source.length.toLocaleString("en")} characters` : "";
  $("choices").hidden = true;
  if (!source.trim()) { last = null; pending = null; show(); return; }
  const mine = (pending = new AbortController());
  $("output").setAttribute("aria-busy", "true");
  try {
    last = await translated(source, mine.signal);
    $("status").textContent = last.truncated ? "The text was longer than the model reads." : "";
  } catch (error) {
    if (error.name === "AbortError") return; // a newer request shows its own result
    last = null;
    $("status").textContent = error.message;
  }
  if (mine === pending) { $("output").setAttribute("aria-busy", "false"); show(); }
}

async function translated(source, signal) {
  if (opened.format !== "srt") return (await call(request(source), signal))[0];
  const subtitles = parseSrt(source);
  const body = request([], { format: "text" }), found = [];
  for (let start = 0; start < subtitles.texts.length; start += MAX_TEXTS) {
    const q = subtitles.texts.slice(start, start + MAX_TEXTS);
    found.push(...(await call({ ...body, q }, signal)));
  }
  return { text: subtitles.assemble(found.map((t) => t.text)), unmet: found.flatMap((t) => t.unmet ?? []) };
}

function show() {
  const output = $("output");
  output.replaceChildren();
  $("unmet").textContent = (last?.unmet ?? []).join("; ");
  $("alignment").hidden = !last?.source_words;
  $("source-words").replaceChildren(...(last?.source_words ?? []).flatMap((word, i) => [span(word, i), " "]));
  if (!last) return;
  const words = opened.format === "text" ? last.words ?? [] : [];
  let rest = last.text;
  words.forEach((word, j) => {
    const at = rest.indexOf(word.text);
    if (at < 0) return;
    output.append(rest.slice(0, at), button(word, j, last.text.length - rest.length + at));
    rest = rest.slice(at + word.text.length);
  });
  output.append(rest);
}

function span(word, i) {
  const element = document.createElement("span");
  element.textContent = word;
  element.dataset.source = i;
  return element;
}

function button(word, j, start) {
  const element = document.createElement("button");
  element.type = "button";
  element.textContent = word.text;
  element.dataset.target = j;
  const sure = word.confidence ?? 1;
  if (sure < UNSURE) element.classList.add(sure < WRONG ? "wrong" : "unsure");
  element.title = `${Math.round(100 * sure)} % likely to be right`;
  for (const event of ["pointerenter", "focus"]) element.addEventListener(event, () => mark(j));
  for (const event of ["pointerleave", "blur"]) element.addEventListener(event, () => mark(-1));
  element.addEventListener("click", () => choose(start));
  return element;
}

function mark(j) {
  const linked = new Set((last?.alignment ?? []).filter(([, b]) => b === j).map(([a]) => String(a)));
  for (const word of $("source-words").children) word.classList.toggle("linked", linked.has(word.dataset.source));
  for (const word of $("output").children) word.classList.toggle("linked", word.dataset.target === String(j));
}

// The sentence of the translation with the character `start`: its texts, where it begins, and how many words are before.
function sentenceAt(start) {
  let at = 0, sourceWords = 0, targetWords = 0;
  for (const entry of last.sentences ?? []) {
    const { source, text } = entry;
    const begin = last.text.indexOf(text, at);
    if (begin < 0) break; // with placeholders, which are not in the sentence
    at = begin + text.length;
    if (start < at) return { entry, source, text, begin, sourceWords, targetWords };
    sourceWords += countWords(source);
    targetWords += countWords(text);
  }
  const line = last.text.slice(0, start).split("\n").length - 1; // lines correspond
  const begin = last.text.lastIndexOf("\n", start - 1) + 1;
  return { source: $("source").value.split("\n")[line] ?? "", text: last.text.split("\n")[line], begin };
}

const countWords = (text) => text.split(/\s+/).filter(Boolean).length;

async function choose(start) {
  const sentence = sentenceAt(start), before = last.text.slice(sentence.begin, start).trim();
  const list = $("choices");
  try {
    const [found] = await call(request(sentence.source, { alternatives: 7, prefix: before || undefined }));
    const texts = new Set([found.text, ...found.alternatives.map((other) => other.text)]);
    texts.delete(sentence.text);
    list.replaceChildren(...[...texts].map((text) => choice(text, sentence)));
    list.hidden = !list.children.length;
    $("status").textContent = list.hidden ? "There are no other translations from this word on." : "";
    list.querySelector("button")?.focus();
  } catch (error) {
    $("status").textContent = error.message;
  }
}

function choice(text, sentence) {
  const item = document.createElement("li"), element = document.createElement("button");
  element.type = "button";
  element.textContent = text;
  element.addEventListener("click", async () => {
    try { // the server gives the links and confidences of the choice, unless it goes on after it
      const [again] = await call(request(sentence.source, { prefix: text }));
      last = replaced(sentence, text, again.text === text && sentence.entry ? again : null);
    } catch {
      last = replaced(sentence, text, null);
    }
    $("choices").hidden = true;
    show();
    $("save").focus();
  });
  item.append(element);
  return item;
}

// The translation with another text for a sentence; `answer` has the words and links of that text, if known.
function replaced(sentence, text, answer) {
  const whole = last.text.slice(0, sentence.begin) + text + last.text.slice(sentence.begin + sentence.text.length);
  if (!answer || !last.words) return { text: whole };
  const { sourceWords, targetWords } = sentence;
  const sourceEnd = sourceWords + countWords(sentence.source), targetEnd = targetWords + countWords(sentence.text);
  const shift = countWords(text) - countWords(sentence.text);
  return {
    ...last,
    text: whole,
    words: [...last.words.slice(0, targetWords), ...answer.words, ...last.words.slice(targetEnd)],
    alignment: [
      ...last.alignment.filter(([i]) => i < sourceWords),
      ...answer.alignment.map(([i, j]) => [i + sourceWords, j + targetWords]),
      ...last.alignment.filter(([i]) => i >= sourceEnd).map(([i, j]) => [i, j + shift]),
    ],
    sentences: last.sentences.map((one) => (one === sentence.entry ? { ...one, text } : one)),
  };
}

function soon() {
  clearTimeout(timer);
  timer = setTimeout(translate, WAIT_MS);
}

async function openFile(file) {
  const kind = file.name.split(".").pop().toLowerCase();
  opened = { name: file.name, format: kind === "srt" ? "srt" : kind.startsWith("htm") ? "html" : "text" };
  $("source").value = await file.text();
  translate();
}

function save() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([last?.text ?? ""], { type: "text/plain;charset=utf-8" }));
  link.download = opened.name.replace(/(\.[^.]+)?$/, ".translated$1");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function models() {
  try {
    const key = $("key").value;
    const answer = await (await fetch("v1/models", { headers: key ? { Authorization: `Bearer ${key}` } : {} })).json();
    const translators = (answer.data ?? []).filter(({ task }) => task === "translate");
    $("model").replaceChildren(...translators.map(({ id }) => new Option(id, id)));
    if (answer.data && !translators.length) $("status").textContent = "This server has no translation model.";
  } catch {
    $("model").replaceChildren();
  }
}

$("source").addEventListener("input", () => {
  if (!$("source").value) opened = { name: "translation.txt", format: "text" };
  soon();
});
$("glossary").addEventListener("input", soon);
$("model").addEventListener("change", translate);
$("key").addEventListener("change", async () => { await models(); translate(); });
$("file").addEventListener("change", (event) => event.target.files[0] && openFile(event.target.files[0]));
$("save").addEventListener("click", save);
$("copy").addEventListener("click", async () => {
  try { // browsers allow it on this machine and over TLS
    await navigator.clipboard.writeText(last?.text ?? "");
    $("status").textContent = "Copied.";
  } catch {
    $("status").textContent = "The browser does not allow copying here: select the text instead.";
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") $("choices").hidden = true;
});
models();

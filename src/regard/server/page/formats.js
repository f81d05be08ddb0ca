// Formats of the page: the glossary editor, and subtitles.

// "cat = gato, gata" per line -> { cat: ["gato", "gata"] }
export function parseGlossary(text) {
  const entries = {};
  for (const line of text.split("\n")) {
    const at = line.indexOf("=");
    const forms = at < 0 ? [] : line.slice(at + 1).split(",").map((form) => form.trim()).filter(Boolean);
    if (forms.length) entries[line.slice(0, at).trim()] = forms;
  }
  return entries;
}

// Subtitles: numbers, times and blank lines stay; the other lines are translated.
export function parseSrt(text) {
  const lines = text.split("\n");
  const spoken = lines.map((line) => line.trim() !== "" && !/^\d+\s*$/.test(line) && !line.includes("-->"));
  const assemble = (texts) => {
    const next = texts[Symbol.iterator]();
    return lines.map((line, n) => (spoken[n] ? next.next().value : line)).join("\n");
  };
  return { texts: lines.filter((_, n) => spoken[n]), assemble };
}

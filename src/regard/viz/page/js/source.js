// Where numbers come from: a live server, or what a standalone file carries. Views never know which.

const BYTES = { uint8: 1, float16: 2, float32: 4 };

/** An array as it was carried: a number is `raw[i] * scale`, and `data` has them multiplied. */
function makeTensor({ shape, dtype, scale = 1 }, buffer) {
  const size = shape.reduce((product, length) => product * length, 1);
  if (buffer.byteLength !== size * BYTES[dtype]) throw new Error(`an array came with ${buffer.byteLength} bytes`);
  const raw =
    dtype === "uint8" ? new Uint8Array(buffer) : dtype === "float32" ? new Float32Array(buffer) : halves(buffer);
  const multiplied = (part) => (scale === 1 ? part : Float32Array.from(part, (stored) => stored * scale));
  let data = null;
  return {
    shape,
    raw,
    scale,
    get data() {
      data ??= multiplied(raw);
      return data;
    },
    /** The part of `raw` at these first indices: `slice(2)` of a [H, Q, K] array is its third [Q, K] matrix. */
    slice(...indices) {
      const rest = shape.slice(indices.length).reduce((product, length) => product * length, 1);
      const start = indices.reduce((place, index, axis) => place * shape[axis] + index, 0) * rest;
      return raw.subarray(start, start + rest);
    },
    row(...indices) {
      return multiplied(this.slice(...indices));
    },
  };
}

function halves(buffer) {
  const codes = new Uint16Array(buffer);
  return Float32Array.from(codes, (code) => {
    const sign = code & 0x8000 ? -1 : 1;
    const exponent = (code >> 10) & 31;
    const fraction = code & 1023;
    if (exponent === 0) return sign * fraction * 2 ** -24;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  });
}

/** The kind of an array; a row of one, such as "output.logits/3", has the array's kind and one axis less. */
function arrayKind(header, name) {
  const kind = header.arrays[name];
  if (kind) return kind;
  const whole = header.arrays[name.replace(/\/\d+$/, "")];
  if (!whole) throw new Error(`this trace has no array ${name}`);
  return { ...whole, shape: whole.shape.slice(1) };
}

const parsed = (buffer) => JSON.parse(new TextDecoder().decode(buffer));

/** A trace: its header, and its arrays and what each layer would say, fetched when they are first asked for. */
function makeTrace(header, request, bytesOf) {
  const parts = new Map();
  const part = (name, read) => {
    if (!parts.has(name)) {
      const coming = bytesOf(name).then(read);
      coming.catch(() => parts.delete(name));
      parts.set(name, coming);
    }
    return parts.get(name);
  };
  return {
    header,
    request,
    array: (name) => part(name, (buffer) => makeTensor(arrayKind(header, name), buffer)),
    /** The entries of `header.layers`, each with `top`: the likeliest next tokens of every token. */
    layers: () => part("layers", parsed),
    /** The text of every token of the output's vocabulary, by id. */
    vocabulary: () => part("vocabulary", parsed),
  };
}

function whole(request) {
  const { run, step = null, text, target = null, changes = [] } = request;
  return { run, step, text, target, continue: request.continue ?? null, changes };
}

export function requestKey(request) {
  const { run, step, text, target, continue: ids, changes } = whole(request);
  return JSON.stringify([run, step, text, target, ids, changes]);
}

async function answered(response) {
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  const error = new Error(said.error ?? said.detail ?? `the server answered ${response.status}`);
  error.status = response.status;
  throw error;
}

async function post(path, body, signal) {
  const headers = { "content-type": "application/json" };
  try {
    return await answered(await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal }));
  } catch (error) {
    if (error instanceof TypeError) throw new Error("The server does not answer; is `regard look` still running?");
    throw error;
  }
}

async function eachLine(response, onLine) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let last = null;
  for (;;) {
    const { value, done } = await reader.read();
    rest += value ?? "";
    const lines = rest.split("\n");
    rest = done ? "" : lines.pop();
    for (const line of lines) {
      if (!line.trim()) continue;
      last = JSON.parse(line);
      if (last.error && typeof last.error === "string") throw new Error(last.error);
      onLine(last);
    }
    if (done) return last;
  }
}

const KEPT_TRACES = 24;
const KEPT_ANSWERS = 8; // explanations and positions, for a file of what is on screen

const answerKey = (kind, request) => JSON.stringify([kind, request]);

/** The file with these answers laid in before what it carries anyway. */
function withAnswers(html, answers) {
  const data = JSON.stringify(Object.fromEntries(answers)).replaceAll("<", "\\u003c");
  const opened = (id) => `<script type="application/json" id="${id}">`;
  const before = opened("regard-data");
  return html.replace(before, () => `${opened("regard-answers")}${data}</script>\n${before}`);
}

/** Asks again a few times where the server is busy: what was asked before and is not wanted any more ends soon. */
async function whenFree(ask) {
  for (let tries = 0; ; tries++) {
    try {
      return await ask();
    } catch (error) {
      if (error.status !== 503 || tries >= 10) throw error;
      await new Promise((done) => setTimeout(done, 300));
    }
  }
}

/** Keeps the last few promises by key; one that fails is forgotten. */
function remember(kept, key, make) {
  if (!kept.has(key)) {
    const coming = make();
    coming.catch(() => kept.delete(key));
    kept.set(key, coming);
    if (kept.size > KEPT_TRACES) kept.delete(kept.keys().next().value);
  }
  return kept.get(key);
}

export function liveSource() {
  const kept = new Map();
  const answers = new Map();
  const weights = new Map(); // which ones the page shows, by run and step: what it asks is about these

  const holder = ({ run, step = null }) => JSON.stringify([run, step]);
  const about = (request) => ({ ...request, weights: weights.get(holder(request)) ?? null });

  /** What comes; where there are other weights by now, what came before is forgotten, and the shell begins anew. */
  async function noticing(coming) {
    try {
      return await coming;
    } catch (error) {
      if (error.status === 409) {
        for (const known of [kept, answers, weights]) known.clear();
        dispatchEvent(new Event("regard-weights"));
      }
      throw error;
    }
  }

  const ask = (path, request, signal) => noticing(post(path, request, signal));

  function keepAnswer(kind, request, found) {
    const key = answerKey(kind, request);
    answers.delete(key);
    answers.set(key, found);
    if (answers.size > KEPT_ANSWERS) answers.delete(answers.keys().next().value);
    return found;
  }

  async function begin(request) {
    const header = await (await post("api/trace", about(whole(request)))).json();
    const shown = weights.get(holder(request)) ?? header.weights; // another answer may have come meanwhile
    if (shown !== header.weights) throw Object.assign(new Error("The weights have changed."), { status: 409 });
    weights.set(holder(request), shown);
    return header;
  }

  async function record(request) {
    const header = await noticing(begin(request));
    const part = async (name) => answered(await fetch(`api/trace/${encodeURIComponent(header.key)}/${name}`));
    return makeTrace(header, request, async (name) => {
      try {
        return await (await noticing(part(name))).arrayBuffer();
      } catch (error) {
        if (error.status !== 404) throw error;
        await ask("api/trace", { ...whole(request), weights: header.weights }); // the server keeps only the last few
        return (await noticing(part(name))).arrayBuffer();
      }
    });
  }

  return {
    live: true,
    runs: async () => (await answered(await fetch("api/runs"))).json(),
    trace: (request) => remember(kept, requestKey(request), () => record(request)),
    explain: async (request, onLine, signal) =>
      keepAnswer(
        "explain",
        request,
        await eachLine(await whenFree(() => ask("api/explain", about(request), signal)), onLine),
      ),
    positions: async (request, signal) =>
      keepAnswer("positions", request, await (await ask("api/positions", about(request), signal)).json()),
    judge: async (request, signal) => (await post("api/judge", request, signal)).json(),
    standalone: async (requests, hash) => {
      const wanted = { requests: requests.map((one) => about(whole(one))), hash };
      return withAnswers(await (await ask("api/standalone", wanted)).text(), answers);
    },
  };
}

async function inflate(base64) {
  const bytes = Uint8Array.from(atob(base64), (sign) => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Response(stream).arrayBuffer();
}

/** The source of a standalone file; `copy` is the file's own text, taken before anything was drawn. */
export function embeddedSource(carried, answers, copy) {
  const kept = new Map();
  const offline = async () => {
    throw new Error("This file carries what was recorded when it was made; for this, open the run with `regard look`.");
  };

  async function find(request) {
    const header = carried.traces[requestKey(request)];
    if (!header) return offline();
    return makeTrace(header, request, async (name) => {
      const packed = carried.arrays[`${name === "vocabulary" ? header.model.run : header.key}/${name}`];
      if (packed === undefined)
        throw new Error("This file does not carry that array; open the run with `regard look`.");
      return inflate(packed);
    });
  }

  const answer = async (kind, request) => answers[answerKey(kind, request)] ?? offline();

  const requests = Object.keys(carried.traces).map((key) => {
    const [run, step, text, target, ids, changes] = JSON.parse(key);
    return { run, step, text, target, continue: ids, changes };
  });
  const isPlain = (one) => one.target === null && one.continue === null && !one.changes.length;
  const ofRun = (run, name) => [
    ...new Set(requests.filter((one) => one.run === run && isPlain(one)).map((one) => one[name])),
  ];

  return {
    live: false,
    requests,
    /** The recorded request that is most like the one wanted, so that the file always has something to open with. */
    nearest(wanted) {
      const likeness = (one) =>
        8 * (one.run === wanted.run) + 4 * (one.text === wanted.text) + 2 * (one.step === wanted.step) + isPlain(one);
      return requests.reduce((best, one) => (likeness(one) > likeness(best) ? one : best));
    },
    texts: (run) => ofRun(run, "text"),
    steps: (run) => ofRun(run, "step"),
    runs: async () => carried.runs,
    trace: (request) => remember(kept, requestKey(request), () => find(request)),
    explain: async (request, onLine) => onLine(await answer("explain", request)),
    positions: (request) => answer("positions", request),
    judge: offline,
    standalone: async () => copy,
  };
}

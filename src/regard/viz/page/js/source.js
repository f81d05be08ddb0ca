// Data sources with one interface: a live server, or the data embedded in a standalone file.

const BYTES = { uint8: 1, float16: 2, float32: 4 };

/** A decoded array: the values are `raw[i] * scale`; `data` has them multiplied. */
function makeTensor({ shape, dtype, scale = 1 }, buffer) {
  const size = shape.reduce((product, length) => product * length, 1);
  if (buffer.byteLength !== size * BYTES[dtype]) throw new Error(`an array has ${buffer.byteLength} bytes instead of ${size * BYTES[dtype]}`);
  const raw =
    dtype === "uint8" ? new Uint8Array(buffer) : dtype === "float32" ? new Float32Array(buffer) : decodeHalf(buffer);
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
      const start = indices.reduce((offset, index, axis) => offset * shape[axis] + index, 0) * rest;
      return raw.subarray(start, start + rest);
    },
  };
}

function decodeHalf(buffer) {
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

/** Shape and dtype of an array, or of a row of one, such as "output.logits/3". */
function arrayInfo(header, name) {
  const info = header.arrays[name];
  if (info) return info;
  const whole = header.arrays[name.replace(/\/\d+$/, "")];
  if (!whole) throw new Error(`this trace has no array ${name}`);
  return { ...whole, shape: whole.shape.slice(1) };
}

const parsed = (buffer) => JSON.parse(new TextDecoder().decode(buffer));

/** A trace: its header, and its arrays, logit lens and vocabulary, which are fetched on first use. */
function makeTrace(header, request, bytesOf) {
  const parts = new Map();
  const part = (name, read) => {
    if (!parts.has(name)) {
      const promise = bytesOf(name).then(read);
      promise.catch(() => parts.delete(name));
      parts.set(name, promise);
    }
    return parts.get(name);
  };
  return {
    header,
    request,
    array: (name) => part(name, (buffer) => makeTensor(arrayInfo(header, name), buffer)),
    /** The entries of `header.layers`, each with `top`: the most likely next tokens at every position. */
    layers: () => part("layers", parsed),
    /** The text of every token of the output's vocabulary, by id. */
    vocabulary: () => part("vocabulary", parsed),
  };
}

/** A trace request with all its fields. */
function complete(request) {
  const { run, step = null, text, target = null, changes = [] } = request;
  return { run, step, text, target, continue: request.continue ?? null, changes };
}

export function requestKey(request) {
  const { run, step, text, target, continue: ids, changes } = complete(request);
  return JSON.stringify([run, step, text, target, ids, changes]);
}

async function answered(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const error = new Error(body.error ?? body.detail ?? `The server answered with status ${response.status}.`);
  error.status = response.status;
  throw error;
}

async function post(path, body, signal) {
  const headers = { "content-type": "application/json" };
  try {
    return await answered(await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal }));
  } catch (error) {
    if (error instanceof TypeError) throw new Error("The server does not respond. Is `regard look` still running?");
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

const CACHED_TRACES = 24;
const CACHED_ANSWERS = 8; // explanations and positions, for standalone files

const answerKey = (kind, request) => JSON.stringify([kind, request]);

/** The standalone file with these answers embedded too. */
function withAnswers(html, answers) {
  const data = JSON.stringify(Object.fromEntries(answers)).replaceAll("<", "\\u003c");
  const tag = (id) => `<script type="application/json" id="${id}">`;
  const before = tag("regard-data");
  return html.replace(before, () => `${tag("regard-answers")}${data}</script>\n${before}`);
}

/** Retries while the server is busy with a request that has just been cancelled. */
async function retryWhileBusy(ask) {
  for (let tries = 0; ; tries++) {
    try {
      return await ask();
    } catch (error) {
      if (error.status !== 503 || tries >= 10) throw error;
      await new Promise((done) => setTimeout(done, 300));
    }
  }
}

/** Adds an entry as the newest, and drops the oldest above `capacity`. */
function insert(cache, key, value, capacity) {
  cache.delete(key);
  cache.set(key, value);
  if (cache.size > capacity) cache.delete(cache.keys().next().value);
}

/** The cached promise of this key, or a new one; failed ones are dropped. */
function cached(cache, key, make) {
  if (!cache.has(key)) {
    const promise = make();
    promise.catch(() => cache.delete(key));
    insert(cache, key, promise, CACHED_TRACES);
  }
  return cache.get(key);
}

export function liveSource() {
  const traces = new Map();
  const answers = new Map();
  const weights = new Map(); // fingerprint of the weights that the page shows, by run and step; sent with requests

  const weightsKey = ({ run, step = null }) => JSON.stringify([run, step]);
  const withWeights = (request) => ({ ...request, weights: weights.get(weightsKey(request)) ?? null });

  /** Awaits a response; if the weights on disk have changed (409), empties the caches and has the page reload. */
  async function checkWeights(promise) {
    try {
      return await promise;
    } catch (error) {
      if (error.status === 409) {
        for (const cache of [traces, answers, weights]) cache.clear();
        dispatchEvent(new Event("regard-weights"));
      }
      throw error;
    }
  }

  const ask = (path, request, signal) => checkWeights(post(path, request, signal));

  function cacheAnswer(kind, request, answer) {
    insert(answers, answerKey(kind, request), answer, CACHED_ANSWERS);
    return answer;
  }

  async function fetchHeader(request) {
    const header = await (await post("api/trace", withWeights(complete(request)))).json();
    const shown = weights.get(weightsKey(request)) ?? header.weights; // a concurrent request may have set them
    if (shown !== header.weights) throw Object.assign(new Error("The weights have changed."), { status: 409 });
    weights.set(weightsKey(request), shown);
    return header;
  }

  async function record(request) {
    const header = await checkWeights(fetchHeader(request));
    const part = async (name) => answered(await fetch(`api/trace/${encodeURIComponent(header.key)}/${name}`));
    return makeTrace(header, request, async (name) => {
      try {
        return await (await checkWeights(part(name))).arrayBuffer();
      } catch (error) {
        if (error.status !== 404) throw error;
        await ask("api/trace", { ...complete(request), weights: header.weights }); // no longer in the server's cache
        return (await checkWeights(part(name))).arrayBuffer();
      }
    });
  }

  return {
    live: true,
    runs: async () => (await answered(await fetch("api/runs"))).json(),
    trace: (request) => cached(traces, requestKey(request), () => record(request)),
    explain: async (request, onLine, signal) => {
      const response = await retryWhileBusy(() => ask("api/explain", withWeights(request), signal));
      return cacheAnswer("explain", request, await eachLine(response, onLine));
    },
    positions: async (request, signal) => {
      const response = await ask("api/positions", withWeights(request), signal);
      return cacheAnswer("positions", request, await response.json());
    },
    standalone: async (requests, hash) => {
      const wanted = { requests: requests.map((one) => withWeights(complete(one))), hash };
      return withAnswers(await (await ask("api/standalone", wanted)).text(), answers);
    },
  };
}

async function inflate(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Response(stream).arrayBuffer();
}

/** The source of a standalone file; `copy` is the text of the file itself. */
export function embeddedSource(embedded, answers, copy) {
  const traces = new Map();
  const offline = async () => {
    throw new Error("This is not in the file. Open the run with `regard look` to compute it.");
  };

  async function find(request) {
    const header = embedded.traces[requestKey(request)];
    if (!header) return offline();
    return makeTrace(header, request, async (name) => {
      const packed = embedded.arrays[`${name === "vocabulary" ? header.model.run : header.key}/${name}`];
      if (packed === undefined)
        throw new Error("This array is not in the file. Open the run with `regard look`.");
      return inflate(packed);
    });
  }

  const answer = async (kind, request) => answers[answerKey(kind, request)] ?? offline();

  const requests = Object.keys(embedded.traces).map((key) => {
    const [run, step, text, target, ids, changes] = JSON.parse(key);
    return { run, step, text, target, continue: ids, changes };
  });
  const isPlain = (one) => one.target === null && one.continue === null && !one.changes.length;
  const valuesOf = (run, name) => [
    ...new Set(requests.filter((one) => one.run === run && isPlain(one)).map((one) => one[name])),
  ];

  return {
    live: false,
    requests,
    /** The embedded request most similar to this one, so that the file always has a view to show. */
    nearest(wanted) {
      const similarity = (one) =>
        8 * (one.run === wanted.run) + 4 * (one.text === wanted.text) + 2 * (one.step === wanted.step) + isPlain(one);
      return requests.reduce((best, one) => (similarity(one) > similarity(best) ? one : best));
    },
    texts: (run) => valuesOf(run, "text"),
    steps: (run) => valuesOf(run, "step"),
    runs: async () => embedded.runs,
    trace: (request) => cached(traces, requestKey(request), () => find(request)),
    explain: async (request, onLine) => onLine(await answer("explain", request)),
    positions: (request) => answer("positions", request),
    standalone: async () => copy,
  };
}

// Asks a rag-windows server over its documents, and shows the answer with what was read.
// Questions, answers and documents are strangers' texts: they become text nodes, never markup.

const METHODS = {
  windows: { name: "Windows", fields: {} },
  sequential: { name: "Sequential", fields: { method: "sequential" } },
};
const SHOWN = 5; // passages before the fold
const UNREADABLE = "The server's answer can't be read. Reload this page and ask again.";

const [form, question, beside, prove, stop, status, said, unlock, key, turns, anew] = [
  "ask", "question", "beside", "prove", "stop", "status", "said", "unlock", "key", "turns", "anew",
].map((id) => document.getElementById(id));

let model = null; // the server's name for it; null until the server has sent it
let accepted = ""; // the key; in this variable only, so that no other page of this host finds it
let running = null; // what aborts the answer being written
let conversation = []; // { question, answers: { windows: text, sequential: text } }

class Refused extends Error {
  constructor(message, locked = false) {
    super(message);
    this.locked = locked;
  }
}

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

async function call(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (accepted) headers.Authorization = `Bearer ${accepted}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server can't be reached. Check that it is still running.");
  }
  if (response.ok) return response;
  if (response.status === 401) {
    throw new Refused(accepted ? "This server does not know the key." : "This server wants a key.", true);
  }
  const body = await response.json().catch(() => null);
  let message = body?.error?.message ?? `The server answered with error ${response.status}.`;
  const wait = Number(response.headers.get("Retry-After"));
  if (wait > 0) message += ` Try again in ${wait} ${wait === 1 ? "second" : "seconds"}.`;
  throw new Refused(message);
}

// The data of server-sent events, up to "[DONE]".
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const piece = await reader.read();
      if (piece.done) return;
      rest += piece.value;
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        const data = lines.map((line) => line.slice(5).trim()).join("\n");
        if (data === "[DONE]") return;
        if (data) yield parsed(data);
      }
    }
  } catch (error) {
    // Where the connection broke, whoever reads misses the end of the answer.
    if (error.name === "AbortError" || error instanceof Refused) throw error;
  } finally {
    reader.cancel().catch(() => {}); // what is left is not wanted
  }
}

function parsed(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new Refused(UNREADABLE);
  }
}

async function load() {
  const models = await (await call("v1/models")).json();
  model = models.data[0].id;
  document.getElementById("model").textContent = model;
  const examples = await (await call("page/examples")).json();
  const offer = (text) => {
    const button = make("button", { type: "button", className: "plain", textContent: text });
    button.addEventListener("click", () => {
      question.focus(); // the button goes away
      put(text);
    });
    return button;
  };
  const offers = examples.map((text) => make("li", {}, offer(text)));
  document.getElementById("examples").replaceChildren(...offers);
  document.getElementById("offered").hidden = !offers.length;
}

function messagesFor(method, asked) {
  const earlier = conversation.flatMap((turn) => {
    const content = turn.answers[method] ?? Object.values(turn.answers)[0];
    return [{ role: "user", content: turn.question }, { role: "assistant", content }];
  });
  return [...earlier, { role: "user", content: asked }];
}

// One answer, written into its view. Throws Refused, or an AbortError.
async function write(method, asked, view, signal) {
  const started = performance.now();
  const response = await call("v1/chat/completions", {
    method: "POST",
    signal,
    body: JSON.stringify({
      model,
      messages: messagesFor(method, asked),
      stream: true,
      stream_options: { include_usage: true },
      // One prompt has no passage that could be left out.
      ...(prove.checked && method === "windows" ? { citations: "removal" } : {}),
      ...METHODS[method].fields,
    }),
  });
  let first = null;
  let finish = null;
  let last = null;
  let usage = null;
  let citations = [];
  let rag = {};
  let thought = "";
  for await (const event of events(response.body)) {
    if (event.error) throw new Refused(event.error.message);
    usage = event.usage ?? usage;
    const choice = event.choices?.[0];
    if (!choice) continue;
    if (choice.delta?.content) {
      last = performance.now();
      first ??= last;
      view.text.append(choice.delta.content);
    }
    citations = choice.delta?.citations ?? citations;
    rag = choice.delta?.rag ?? rag;
    thought += choice.delta?.reasoning_content ?? "";
    finish = choice.finish_reason ?? finish;
  }
  if (!finish) throw new Refused("The answer broke off: the server closed the connection.");
  // Passages are left out after the last word.
  const ended = last ?? performance.now();
  if (finish === "length") view.note("Cut off at the limit of its length.");
  const said = view.text.textContent;
  if (!said) view.note("The answer is empty.");
  if (thought) view.thought(thought);
  if (rag.fallback) view.note(rag.fallback.message);
  if (rag.supported === false) {
    view.note("No passage supports this answer: they hardly make it likelier. It may be made up.", "bad");
  }
  view.sentences(rag.statements ?? [], citations);
  view.facts(started, first ?? ended, ended, usage, rag);
  view.passages(citations, rag);
  return said;
}

const seconds = (from, to) => `${((to - from) / 1000).toFixed(2)} s`;
const count = (number) => number.toLocaleString("en");
const percent = (weight) => `${(100 * weight).toFixed(weight < 0.0995 ? 1 : 0)}%`;

// The place of one answer.
function viewOf(method, place) {
  const text = make("div", { className: "text", dir: "auto" });
  const box = make("section", { className: "answer" }, make("h3", { textContent: METHODS[method].name }), text);
  box.setAttribute("aria-label", `${METHODS[method].name}: answer`);
  box.setAttribute("aria-busy", "false");
  place.append(box);
  return {
    box,
    text,
    note: (words, className = "soft") => box.append(make("p", { className, textContent: words })),
    thought(words) {
      const summary = make("summary", { textContent: "What the model thought first" });
      const all = make("div", { className: "text soft", dir: "auto", textContent: words });
      box.append(make("details", { className: "more" }, summary, all));
    },
    // Each sentence that passages carried is underlined, and names them on hover, focus and touch.
    sentences(statements, citations) {
      const whole = text.textContent;
      const parts = [];
      let at = 0;
      for (const said of statements) {
        const start = whole.indexOf(said.text, at);
        if (start < 0) continue;
        const end = start + said.text.length;
        parts.push(whole.slice(at, start), said.citations.length ? sentence(said, citations) : said.text);
        at = end;
      }
      if (parts.length) text.replaceChildren(...parts, whole.slice(at));
    },
    facts(started, first, ended, usage, rag) {
      const facts = { "First token": seconds(started, first), "Whole answer": seconds(started, ended) };
      if (usage) {
        facts.Written = `${count(usage.completion_tokens)} tokens`;
        const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
        facts["From the cache"] = `${count(cached)} of ${count(usage.prompt_tokens)} tokens`;
      }
      if (rag.method) facts.Method = rag.method.name;
      const pair = ([name, value]) =>
        make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }));
      box.append(make("dl", {}, ...Object.entries(facts).map(pair)));
    },
    passages(citations, rag) {
      box.append(make("h4", { textContent: "What it read, by share of its attention" }));
      if (!citations.length) {
        this.note("No passage: none was found, or this server has no documents.");
        return;
      }
      const ranked = citations.toSorted((a, b) => b.weight - a.weight);
      const rows = ranked.map((one) => make("li", {}, passage(one, placeOf(one, citations))));
      box.append(make("ol", {}, ...rows.slice(0, SHOWN)));
      const more = rows.slice(SHOWN);
      if (more.length) {
        const summary = make("summary", { textContent: `${more.length} more` });
        box.append(make("details", { className: "more" }, summary, make("ol", {}, ...more)));
      }
      if (rag.query_weight != null) {
        const instruction = rag.prefix_weight >= 0.0005 ? ` and the instruction ${percent(rag.prefix_weight)}` : "";
        this.note(`The question and the answer itself got ${percent(rag.query_weight)}${instruction}.`);
      }
      for (const note of rag.notes ?? []) this.note(note);
    },
  };
}

const titleOf = ({ title, id, index }) => title || id || `Passage ${index + 1}`;

// Where several have one title: where in the document a passage stands, else its id or number.
function placeOf(one, all) {
  const own = titleOf(one);
  if (all.filter((other) => titleOf(other) === own).length < 2) return "";
  return one.place || (one.id && one.id !== own ? one.id : `passage ${one.index + 1}`);
}

let sentencesMade = 0;

function sentence(said, citations) {
  const id = `sources-${(sentencesMade += 1)}`;
  const rows = said.citations.map((one) => {
    const cited = citations.find((other) => other.index === one.passage);
    const place = placeOf(cited, citations);
    const name = make("bdi", { textContent: titleOf(cited) + (place ? `, ${place}` : "") });
    return make("span", {}, name, ` ${percent(one.mass)}${lossOf(one)}`);
  });
  const sources = make("span", { className: "sources", id, role: "tooltip" }, ...rows);
  const words = make("span", { className: "said", tabIndex: 0, textContent: said.text });
  words.setAttribute("aria-describedby", id);
  const place = () => {
    const box = words.closest(".text").getBoundingClientRect();
    sources.style.top = `${words.getBoundingClientRect().bottom - box.top}px`;
    sources.hidden = false;
  };
  words.addEventListener("pointerenter", place);
  words.addEventListener("focus", place);
  return make("span", { className: "sentence" }, words, sources);
}

// What the answer loses without a passage, where that was measured.
function lossOf({ drop, supports }) {
  if (!drop) return ""; // not measured, or not read
  const proof = { yes: ", supports it", unsure: ", may support it" }[supports] ?? "";
  const loss = (drop > 0 ? "−" : "+") + Math.abs(drop).toFixed(1);
  return `${proof}, ${loss} nats without it`;
}

// A row with name, bar and share of the attention; a click opens the text.
function passage(one, place) {
  const name = make("bdi", { textContent: titleOf(one) });
  const where = place ? [make("span", { className: "place soft" }, make("bdi", { textContent: place }))] : [];
  const fill = make("span", { className: "fill" });
  fill.style.width = `${100 * one.weight}%`;
  const summary = make(
    "summary",
    {},
    make("span", {}, make("span", { className: "name" }, name), ...where),
    make("span", { className: "track", ariaHidden: "true" }, fill),
    make("span", { className: "amount", textContent: percent(one.weight) }),
  );
  const text = make("div", { className: "text", dir: "auto", textContent: one.text ?? "" });
  if (one.text == null) text.textContent = "The server does not show this text.";
  const loss = lossOf(one).slice(2);
  const proof = loss ? [make("p", { className: "soft", textContent: `For the answer: ${loss}.` })] : [];
  return make("details", { className: "passage" }, summary, ...proof, text);
}

// Ends a view with an error; a missing key opens its field.
function fail(view, error) {
  if (error.name === "AbortError") {
    view.note("Stopped.");
    status.textContent = "Stopped.";
    return;
  }
  if (!(error instanceof Refused)) {
    console.error(error);
    error = new Refused(UNREADABLE);
  }
  view.note(error.message, "bad");
  status.textContent = error.message;
  if (error.locked) lock();
}

function lock() {
  unlock.hidden = false;
  key.focus();
}

async function ask(asked) {
  const methods = beside.checked ? ["windows", "sequential"] : ["windows"];
  const answers = make("div", { className: "answers" });
  const heading = make("h2", { textContent: asked, dir: "auto" });
  const place = make("li", {}, heading, answers);
  turns.append(place);
  document.getElementById("welcome").hidden = true;
  anew.hidden = false;
  busy(true);
  place.scrollIntoView({ block: "start" });
  const controller = (running = new AbortController());
  const turn = { question: asked, answers: {} };
  // One after the other, so that neither takes the other's time.
  for (const method of methods) {
    const view = viewOf(method, answers);
    view.box.setAttribute("aria-busy", "true");
    status.textContent = methods.length > 1 ? `Answering: ${METHODS[method].name.toLowerCase()} …` : "Answering …";
    let failure = null;
    let whole = null; // its text alone: the view names the sources of sentences, too
    try {
      if (!model) await load();
      whole = await write(method, asked, view, controller.signal);
    } catch (error) {
      failure = error;
    }
    if (running !== controller) return; // a new conversation began meanwhile
    if (failure) fail(view, failure);
    else status.textContent = "";
    view.box.setAttribute("aria-busy", "false");
    const text = whole ?? view.text.textContent;
    const stopped = controller.signal.aborted;
    // What the user stopped belongs to the conversation; what broke off does not.
    if (text && (stopped || !failure)) turn.answers[method] = text;
    if (failure || stopped) break;
  }
  running = null;
  said.textContent = Object.entries(turn.answers)
    .map(([method, text]) => `${METHODS[method].name}: ${text}`)
    .join("\n");
  if (Object.keys(turn.answers).length) conversation.push(turn);
  else question.value ||= asked;
  if (document.activeElement === stop) question.focus();
  busy(false);
}

// The button stays where it is, so that whoever stands on it with the keyboard isn't lost.
function busy(is) {
  stop.hidden = !is;
  form.querySelector("[type=submit]").ariaDisabled = String(is);
}

// What was typed, or an example.
function put(asked) {
  if (running) {
    status.textContent = "An answer is being written. Stop it, or wait for its end.";
  } else if (!asked) {
    status.textContent = "Write a question first.";
    question.focus();
  } else {
    question.value = "";
    ask(asked);
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  put(question.value.trim());
});

question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  running?.abort();
  for (const sources of document.querySelectorAll(".sources")) sources.hidden = true;
});

stop.addEventListener("click", () => running?.abort());

anew.addEventListener("click", () => {
  running?.abort();
  running = null;
  conversation = [];
  turns.replaceChildren();
  status.textContent = said.textContent = "";
  document.getElementById("welcome").hidden = false;
  anew.hidden = true;
  busy(false);
  question.focus();
});

unlock.addEventListener("submit", async (event) => {
  event.preventDefault();
  accepted = key.value.trim();
  if (/^[\x21-\x7e]+$/.test(accepted)) {
    await begin();
  } else {
    accepted = "";
    status.textContent = "A key has letters, digits and signs of ASCII only, and no spaces.";
  }
});

// Learns the model's name, or that a key is wanted.
async function begin() {
  status.textContent = "";
  try {
    await load();
    if (!unlock.hidden) question.focus(); // the field of the key goes away
    unlock.hidden = true;
    key.value = "";
  } catch (error) {
    if (error.locked) lock();
    status.textContent = error.message;
  }
}

question.focus();
begin();

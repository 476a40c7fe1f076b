// The page: sends a prompt, shows the text as it arrives, and draws speed and drafting beside it.

import { Chart, short } from "./charts.js";
import { npy, report, save } from "./files.js";
import { ApiError, ask, request, stream } from "./stream.js";
import { Takes } from "./takes.js";
import { TextView, styleOf } from "./text.js";

const GENERATIONS = "/v1/longdraft/generations";
const POLL_MS = 3000;
const $ = (id) => document.getElementById(id);
const number = (id) => ($(id).value.trim() === "" ? undefined : Number($(id).value));

const SOURCES = { "": "the model itself", self: "the model, on a partial cache", heads: "trained heads", suffix: "suffix matching",
  ngram: "n-grams", draft: "a draft model", glide: "a glide layer", eagle: "an EAGLE head", retrieval: "the model, on retrieved chunks", earlier: "generated earlier" };
const view = new TextView($("text"), (follows) => { $("follow").hidden = follows || !view.length; });
const speed = new Chart($("speed-chart"), { unit: "tokens/s", plain: "plain decoding", describe: (value, plain, at) =>
  `${value.toFixed(0)} tokens per second at a context of ${at} tokens${plain ? `; plain decoding ${plain.toFixed(0)}` : ""}` });
const lengths = new Chart($("length-chart"), { unit: "per step", digits: 1, line: "--heads", floor: 1, describe: (value, _, at) =>
  `${value.toFixed(1)} tokens per forward of the model at a context of ${at} tokens; 1 in plain decoding` });
const takes = new Takes(view, { go: (token, words) => fromHere(token, words).catch(showError), show: (take) => showTake(take).catch(showError),
  seed: () => (run?.seed ?? 0) + 1 });
let run = null; // the text on display: { id, journal, seed, max, prompt, promptTokens, controller, stats, state, ... }
const FIGURES = ["rate", "gain", "length", "context", "eta", "elapsed", "seed-used", "count"];
const isRunning = () => document.body.dataset.state === "running";
const kept = { // a browser may refuse to keep any
  get: (name) => { try { return localStorage.getItem(name); } catch { return null; } },
  set: (name, value) => { try { localStorage.setItem(name, value); } catch { /* it lasts until the page is left */ } },
};

// ---- generating

function settings() {
  const ours = { details: true, journal: window.keepsJournals || undefined, drafter: $("drafter").value || undefined,
    min_p: number("min_p"), top_k: number("top_k"), repetition_penalty: number("repetition_penalty"),
    penalty_window: number("penalty_window"), on_loop: $("on_loop").value, thinking_budget: number("thinking_budget") };
  const body = { stream: true, max_tokens: number("max_tokens"), temperature: number("temperature"), top_p: number("top_p"),
    stop: $("stop").value || undefined, longdraft: ours };
  if ($("seed").value.trim()) body.seed = number("seed");
  if (body.seed > Number.MAX_SAFE_INTEGER) throw new Error(`The seed is too large for this page, which takes 0 to ${Number.MAX_SAFE_INTEGER} (2^53 - 1). The API and the command line take larger ones.`);
  if ($("chat").checked) return ["/v1/chat/completions", { ...body, messages: [{ role: "user", content: $("prompt").value }], tools: functions() }];
  return ["/v1/completions", { ...body, prompt: $("prompt").value }];
}

// The functions of the form, each as OpenAI has it, or the function itself.
function functions() {
  const text = $("tools").value.trim();
  if (!text) return undefined;
  let given;
  try { given = JSON.parse(text); } catch (error) { throw new Error(`Functions: not valid JSON: ${error.message}`); }
  if (!Array.isArray(given)) throw new Error("Functions: write a list, such as [{\"name\": ..., \"parameters\": ...}]");
  return given.map((each) => (each?.function ? each : { type: "function", function: each }));
}

async function generate() {
  let url, body;
  try { [url, body] = settings(); } catch (error) { showFormError(error); return; }
  if (!(await leave("Stop it and generate another?"))) return;
  const isChat = Boolean(body.messages);
  begin({ prompt: $("prompt").value, max: body.max_tokens, id: null, body, messages: body.messages, isOfForm: true, said: isChat ? "" : undefined });
  takes.clear();
  await receive(url, body);
}

// ---- leaving a text that is being written

// Ask in a dialog of the page. The answer of a dialog that is closed is no.
function sure(text, yes) {
  const box = $("sure");
  if (box.open) return Promise.resolve(false);
  $("sure-text").textContent = text;
  $("sure-yes").textContent = yes;
  box.returnValue = "";
  box.showModal();
  return new Promise((resolve) => { box.addEventListener("close", () => resolve(box.returnValue === "yes"), { once: true }); });
}

// Whether another text may be shown: none is being written, or it is stopped after a question.
async function leave(question) {
  if (!isRunning()) return true;
  if (!(await sure(`A text is being written. ${question}`, "Stop the text"))) return false;
  await halt();
  return true;
}

// Stop the text on display, and keep what it has.
async function halt() {
  if (!isRunning()) return;
  const mine = run;
  await Promise.race([stop(), new Promise((resolve) => { setTimeout(resolve, 700); })]);
  mine.controller.abort();
  if (mine === run && !mine.hasEnded) onEnd("cut");
}

// ---- takes

// Go on after the first `token` tokens of the text on display, with another seed or after words of one's own.
async function fromHere(token, words) {
  if (run.body.tools) throw new Error("A text with functions has no takes: its prompt lists them, and a grammar is on. Generate it with another seed.");
  await halt();
  const before = run, tokens = view.tokens.slice(0, token), pieces = view.pieces.slice(0, token);
  takes.keep({ run: before, seed: before.seed, from: before.from });
  before.promptIds ??= (await ask("/tokenize", "POST", before.messages ? { messages: before.messages } : { prompt: before.prompt })).tokens;
  if (words) {
    const own = (await ask("/tokenize", "POST", { prompt: words, add_special_tokens: false })).tokens;
    tokens.push(...own);
    pieces.push(words, ...own.slice(1).map(() => ""));
  }
  const { messages, ...kept } = before.body, seed = words ? before.seed : before.seed + 1;
  const body = { ...kept, prompt: [...before.promptIds, ...tokens], seed, max_tokens: Math.max(1, before.max - tokens.length) };
  const { prompt, promptIds } = before, { thoughtEnd } = view;
  begin({ prompt, promptIds, messages, body: kept, max: before.max, id: null, seed, from: token, offset: tokens.length });
  takes.begin();
  if (tokens.length) view.push({ tokens, pieces, sources: tokens.map(() => ""), steps: tokens.map(() => 1) }, true);
  if (thoughtEnd && thoughtEnd <= token) view.think(thoughtEnd);
  await receive("/v1/completions", body);
}

async function showTake(take) {
  if (take === takes.current || !(await leave(`Stop it and show take ${take.number}?`))) return;
  takes.select(take);
  run = take.run;
  speed.clear();
  lengths.clear();
  view.show(run.prompt, take.text);
  drawCalls();
  set(run.isCut ? "cut" : "done", `Take ${take.number}`);
  offerResume();
  update();
}

function offerResume() {
  $("resume").hidden = !run.isCut || !window.keepsJournals || !run.id;
}

// Begin with a text of the list in place of the one on display; null if that is to go on.
async function opened(id, question) {
  const about = await ask(`${GENERATIONS}/${id}`);
  check(about);
  if (!(await leave(question))) return null;
  const known = ofJournal(about, id);
  close();
  begin(known);
  takes.clear();
  return about;
}

async function resume(id) {
  if (!(await opened(id, "Stop it and resume the other one?"))) return;
  await receive(`${GENERATIONS}/${id}/resume`, { stream: true, details: true });
}

// Resume the text on display, which may be a take. What the page knows of it remains.
async function resumeShown() {
  const { id, prompt, promptIds, messages, body, max, seed, from, offset = 0 } = run, { thoughtEnd } = view;
  const tokens = view.tokens.slice(0, offset), pieces = view.pieces.slice(0, offset);
  begin({ id, prompt, promptIds, messages, body, max, seed, from, offset, isResumed: true });
  if (offset) view.push({ tokens, pieces, sources: tokens.map(() => ""), steps: tokens.map(() => 1) }, true);
  if (Number.isFinite(thoughtEnd) && thoughtEnd) view.think(thoughtEnd);
  await receive(`${GENERATIONS}/${id}/resume`, { stream: true, details: true });
}

// Whether the server still has the text and can read it.
function check(about) {
  if (about.tokens) return;
  throw new ApiError("model" in about ? "This text belongs to another model. Open it on a server of that model." : "The server does not have this text any more.");
}

// What is known of a text from its journal.
function ofJournal(about, id) {
  const { temperature, top_p, stop, min_p, top_k, repetition_penalty, penalty_window, thinking_budget, on_loop } = about.sampling;
  const body = { stream: true, temperature, top_p, stop: stop?.length ? stop : undefined,
    longdraft: { details: true, journal: true, min_p, top_k, repetition_penalty, penalty_window, thinking_budget, on_loop } };
  const { message } = about;
  return { prompt: message ?? about.prompt, promptIds: about.prompt_ids, max: about.max_new_tokens, id, body, isResumed: true,
    messages: message === null ? undefined : [{ role: "user", content: message }] };
}

// What is on display, so that it can come back if the server refuses the next text.
function shelve() {
  const figures = FIGURES.map((id) => $(id).textContent), charts = [speed, lengths].map(({ points, stride, fresh }) => ({ points, stride, fresh }));
  return { run, text: view.snapshot(), all: takes.all, current: takes.current, figures, charts, place: view.element.scrollTop };
}

function unshelve({ run: before, text, all, current, figures, charts, place }) {
  run = before;
  view.show(run.prompt, text);
  takes.restore(all, current);
  [speed, lengths].forEach((chart, i) => { Object.assign(chart, charts[i]); chart.dirty(); });
  FIGURES.forEach((id, i) => { $(id).textContent = figures[i]; });
  drawCalls();
  update();
  view.follows = false;
  view.element.scrollTop = place;
}

function begin(next) {
  run?.controller.abort();
  const shelf = run && view.length ? shelve() : null;
  view.clear();
  speed.clear();
  lengths.clear();
  run = { stats: null, seed: null, promptTokens: null, progress: null, sawOld: false, began: performance.now(), shelf, ...next,
    controller: new AbortController(), calls: [] };
  drawCalls();
  view.prompt(run.prompt);
  $("error").hidden = $("failure").hidden = true;
  if ($("offer").contains(document.activeElement)) $("text").focus({ preventScroll: true });
  $("offer").hidden = true;
  $("follow").hidden = true;
  if (matchMedia("(min-width: 761px)").matches && !run.isResumed) fold(true);
  for (const id of FIGURES) $(id).textContent = "–";
  legend();
  set("running", "Queued");
  if (matchMedia("(max-width: 760px)").matches) document.querySelector(".reading").scrollIntoView();
}

async function receive(url, body) {
  const mine = run;
  try {
    await stream(url, body, { open: (id) => { mine.id ??= id; }, chunk: (chunk) => mine === run && onChunk(chunk),
      progress: (progress) => mine === run && onProgress(progress) }, mine.controller.signal);
    if (mine === run && !mine.hasEnded) onEnd("done");
  } catch (error) {
    if (mine !== run || mine.hasEnded) return;
    if (mine.isStopped || error.name === "AbortError" || error.code === "cancelled") onEnd("cut");
    else onError(error);
  }
}

function onChunk(chunk) {
  for (const call of chunk.choices?.[0]?.delta?.tool_calls ?? []) showCall(call);
  const detail = chunk.longdraft;
  if (!detail?.tokens) return;
  const isOld = run.isResumed && !run.sawOld;
  run.sawOld = true;
  run.shelf = null;
  view.push(detail, isOld);
  divide(detail.pieces, chunk.choices[0]?.delta);
  run.seed = detail.seed;
  run.stats = detail.stats ?? run.stats;
  run.reason = detail.finish_reason ?? run.reason;
  onProgress(detail.progress);
}

// Tell the thought from the answer. The reply of a chat has them apart, a continuation only the tag.
function divide(pieces, delta) {
  const first = view.length - pieces.length, isOpen = view.thoughtEnd === Infinity;
  if (delta && run.said !== undefined) {
    if (delta.reasoning_content && !run.said.trim()) view.think(Infinity);
    run.said += delta.content ?? "";
    if (view.thoughtEnd !== Infinity || !run.said.trim()) return;
    const at = pieces.join("").lastIndexOf(delta.content);
    let token = 0, length = 0;
    while (token < pieces.length && length + pieces[token].length <= at) length += pieces[token++].length;
    view.think(first + (at < 0 ? 0 : token));
  } else if (run.messages && !view.thoughtEnd && !isOpen) {
    const end = pieces.findIndex((piece) => piece.trim() === "</think>");
    if (end >= 0) view.think(first + end + 1);
  }
}

// The answer of a chat without its thought, or the continuation of a prompt.
function answer() {
  if (!run.messages) return view.string;
  const own = run.said ?? view.pieces.slice(Math.min(view.thoughtEnd, view.length)).join("");
  return own.trim() ? own.trimStart() : view.string;
}

const whole = () => (run.messages ? answer() : run.prompt + view.string);

// The first words of a text, as a title.
function firstWords(text) {
  const line = text.slice(0, 400).trim().replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 60).replace(/\s\S*$/, "")}…` : line;
}

// A call as a folded block: the function, and its arguments, which come in pieces.
function showCall({ index, function: { name, arguments: more } }) {
  let block = run.calls[index];
  if (!block) {
    block = run.calls[index] = document.createElement("details");
    block.append(document.createElement("summary"), document.createElement("pre"));
    block.firstChild.textContent = `Call of ${name}`;
    drawCalls();
  }
  block.lastChild.textContent += more ?? "";
}

function drawCalls() {
  $("calls").replaceChildren(...run.calls);
  $("calls").hidden = !run.calls.length;
}

function onProgress(progress) {
  run.progress = progress;
  run.promptTokens = progress.prompt_tokens - (run.offset ?? 0);
  run.max = progress.max_new_tokens + (run.offset ?? 0);
  const { own_tokens_per_second: rate, plain_tokens_per_second: plain, new_tokens: done } = progress;
  const context = progress.prompt_tokens + done;
  if (progress.state === "queued") set("running", "Queued");
  else if (progress.state === "prefill" && !done) set("running", progress.prefill_tokens ? `Prefill: ${short(progress.prefill_tokens)} of ${short(progress.prompt_tokens)}` : "Prefill");
  else set("running", "Generating");
  if (done && rate) {
    speed.add(context, rate, plain);
    lengths.add(context, progress.mean_accepted_length && recentLength(progress));
  }
  scheduleUpdate();
}

// Tokens per step since the previous point. The mean over the whole text would hide recent changes.
function recentLength(progress) {
  const steps = progress.new_tokens / progress.mean_accepted_length, before = run.before;
  if (before && progress.new_tokens - before.tokens < 24) return run.recent;
  run.before = { tokens: progress.new_tokens, steps };
  const fresh = before && steps > before.steps ? (progress.new_tokens - before.tokens) / (steps - before.steps) : progress.mean_accepted_length;
  run.recent = run.isResumed ? Math.min(fresh, 64) : fresh;
  return run.recent;
}

function scheduleUpdate() {
  scheduleUpdate.frame ??= setTimeout(() => { scheduleUpdate.frame = null; update(); }, 100);
}

function update() {
  if (!run) return;
  const progress = run.progress, done = view.length, share = run.max ? done / run.max : 0;
  $("progress").setAttribute("aria-valuenow", done);
  $("progress").setAttribute("aria-valuemax", run.max ?? 0);
  $("progress").firstElementChild.style.width = `${100 * Math.min(1, share)}%`;
  $("count").textContent = run.max ? `${done.toLocaleString()} of ${run.max.toLocaleString()} tokens` : `${done.toLocaleString()} tokens`;
  if (progress) {
    const { own_tokens_per_second: rate, plain_tokens_per_second: plain } = progress;
    const isOn = isRunning();
    const shown = isOn ? rate : run.stats?.tokens_per_second ?? rate;
    $("rate").textContent = shown ? (shown < 10 ? shown.toFixed(1) : Math.round(shown).toLocaleString()) : "–";
    if (rate && plain) {
      $("gain").textContent = `${(rate / plain).toFixed(1)} ×`;
      $("gain").parentElement.classList.toggle("ahead", rate > 1.05 * plain);
    }
    $("length").textContent = progress.mean_accepted_length ? progress.mean_accepted_length.toFixed(2) : "–";
    $("context").textContent = short((run.promptTokens ?? 0) + done);
    $("eta").textContent = isOn && progress.eta_seconds ? clock(progress.eta_seconds) : "–";
    $("elapsed").textContent = clock(progress.elapsed_seconds);
    document.title = isOn ? `${Math.floor(100 * share)} % · longdraft` : "longdraft";
  }
  $("seed-used").textContent = run.seed ?? "–";
  showThought(progress?.thinking, progress?.thinking_budget);
  for (const id of ["copy", "save-text", "save-markdown", "save-epub", "save-tokens", "save-report"]) $(id).disabled = !done;
  legend();
}

// The thought's length beside its budget, and the button that ends it.
function showThought(thinking, budget) {
  const isOpen = Boolean(thinking?.opened) && !thinking.closed_by, isOn = document.body.dataset.state === "running";
  $("thought").hidden = !thinking?.opened;
  $("answer").hidden = !(isOpen && isOn);
  if (!thinking?.opened) return;
  const most = budget ?? run.max ?? 0, bar = $("thought-bar");
  bar.setAttribute("aria-valuenow", thinking.tokens);
  bar.setAttribute("aria-valuemax", most);
  bar.firstElementChild.style.width = `${100 * Math.min(1, most ? thinking.tokens / most : 0)}%`;
  const closed = { budget: "closed at its budget", reserve: "closed for the answer", loop: "closed in a loop", request: "closed on request" };
  const state = isOpen ? "" : `, ${closed[thinking.closed_by] ?? "ended by the model"}`;
  $("thought-count").textContent = `Thought: ${thinking.tokens.toLocaleString()}${budget == null ? "" : ` of ${budget.toLocaleString()}`} tokens${state}`;
}

async function answerNow() {
  $("answer").disabled = true;
  try { await ask(`${GENERATIONS}/${run.id}/answer`, "POST"); } catch (error) { if (error.code !== "not_thinking") showError(error); }
  $("answer").disabled = false;
}

function legend() {
  const total = Math.max(1, view.length - view.old);
  const rows = view.names.map((name, i) => [name, view.counts[i] - (i === 0 ? view.old : 0)]).sort((a, b) => b[1] - a[1]);
  if (view.old) rows.push(["earlier", null]);
  $("legend").replaceChildren(...rows.map(([name, count]) => {
    const row = document.createElement("li"), swatch = document.createElement("span"), share = document.createElement("span");
    const label = document.createElement("b"), style = name === "earlier" ? 0 : styleOf(name);
    swatch.className = style ? `swatch g s${style} first last` : "swatch plain";
    label.textContent = SOURCES[name] ?? name;
    if (name && name !== "earlier") label.title = name;
    share.className = "share";
    share.textContent = count === null ? view.old.toLocaleString() : view.length ? `${(100 * count / total).toFixed(0)} %` : "";
    row.append(swatch, label, share);
    return row;
  }));
}

function onEnd(how) {
  const { shelf } = run;
  run.hasEnded = true;
  run.shelf = null;
  if (shelf && how === "cut" && !run.sawOld) { // stopped before its first token: the text before it comes back
    unshelve(shelf);
    set(run.isCut ? "cut" : "done", "Stopped");
    offerResume();
    refresh();
    return;
  }
  run.isCut = how === "cut";
  view.flush();
  const reasons = { length: "Finished", eos: "Ended by the model", stop: "Stopped at the stop text", loop: "Stopped in a loop" };
  set(how === "cut" ? "cut" : "done", how === "cut" ? "Stopped" : reasons[run.reason] ?? "Finished");
  const stopText = run.body?.stop;
  if (how === "cut" || view.string.trim()) { /* it has words */ }
  else if (run.reason === "stop" && stopText) showError(new Error(`The model wrote the stop text “${[stopText].flat().join("” or “")}” at once, so the text is empty. Try another seed, or no stop text.`));
  else showError(new Error(`The model ended the text ${run.reason === "eos" ? "at once" : "without a word"}. ${$("chat-row").hidden || $("chat").checked ? "Try another prompt or seed." : "Models that are tuned for chat answer messages: send the prompt as a chat message."}`));
  offerResume();
  if (takes.all.length) takes.keep({ run, seed: run.seed, from: run.from });
  update();
  speed.draw();
  lengths.draw();
  refresh();
}

function onError(error) {
  const isCut = error.code === "cut" || error.code === "draining" || error instanceof TypeError;
  const { sawOld: hasBegun, isOfForm } = run;
  onEnd("cut");
  set("failed", isCut ? "Connection lost" : hasBegun ? "Failed" : "Refused");
  offerResume();
  if (hasBegun || !isOfForm) showError(error);
  else showFormError(error);
}

// A stream that does not end soon is left.
async function stop() {
  if (!isRunning() || !run) return;
  const mine = run;
  mine.isStopped = true;
  setTimeout(() => mine.controller.abort(), 700);
  if (mine.id) await ask(`${GENERATIONS}/${mine.id}/cancel`, "POST").catch(() => {});
}

function set(state, text) {
  document.body.dataset.state = state;
  $("status").textContent = text;
  const isOn = state === "running", hidden = $(isOn ? "resume" : "stop-run");
  if (document.activeElement === hidden) $("text").focus({ preventScroll: true }); // a hidden button cannot keep the focus
  $("stop-run").hidden = !isOn;
  if (isOn) $("resume").hidden = true;
  else document.title = "longdraft";
  $("start").textContent = isOn ? "Generate another" : "Generate";
}

function clock(seconds) {
  const all = Math.round(seconds), h = Math.floor(all / 3600), m = Math.floor(all / 60) % 60, s = all % 60;
  return h ? `${h}:${String(m).padStart(2, "0")}:${String(s).padStart(2, "0")}` : `${m}:${String(s).padStart(2, "0")}`;
}

// ---- past texts

async function refresh() {
  let found;
  try { found = (await ask(GENERATIONS)).data; } catch (error) {
    refresh.hasFailed = true;
    if (!$("past").hidden) showError(error);
    return;
  }
  if (refresh.hasFailed) $("past-failure").hidden = true;
  refresh.hasFailed = false;
  const cut = found.find((each) => each.resumable);
  $("offer").hidden = !cut || document.body.dataset.state !== "idle";
  if (cut && !$("offer").hidden) showOffer(cut);
  if ($("past").hidden) return;
  const rows = found.filter((each) => isActive(each) || isOnDisk(each)).map(entry);
  if (!rows.length) rows.push(Object.assign(document.createElement("li"), { textContent: "None yet." }));
  const had = document.activeElement?.dataset?.key;
  $("list").replaceChildren(...rows);
  if (had) document.querySelector(`[data-key="${CSS.escape(had)}"]`)?.focus();
}

const isActive = (about) => ["running", "prefill", "queued"].includes(about.state);
// What the server knows from a journal has the model's name. A text that it only remembers cannot be read.
const isOnDisk = (about) => "model" in about || about.state === "unreadable";

function showOffer(about) {
  const text = document.createElement("p");
  text.dir = "auto";
  text.textContent = `A text was interrupted after ${about.new_tokens.toLocaleString()} of ${about.max_new_tokens.toLocaleString()} tokens: “${about.title}”`;
  $("offer").replaceChildren(text, button("Resume", () => resume(about.id), "primary"), button("Not now", () => { $("offer").hidden = true; }));
}

function button(text, action, kind = "", key = "") {
  const made = Object.assign(document.createElement("button"), { type: "button", textContent: text, className: kind });
  made.dataset.key = key;
  made.addEventListener("click", () => Promise.resolve(action()).catch(showError));
  return made;
}

const messageFor = (error) => (error instanceof TypeError && /fetch|network|load/i.test(error.message) ? "The server does not answer." : error.message);

function tell(id, error) {
  $(id).textContent = messageFor(error);
  $(id).hidden = false;
}

// Beside the text, or in the list of texts while it is open.
function showError(error) {
  tell($("past").hidden ? "failure" : "past-failure", error);
}

function showFormError(error) {
  fold(false);
  tell("error", error);
  $("error").scrollIntoView({ block: "nearest" });
}

function entry(about) {
  const row = document.createElement("li"), title = document.createElement("p"), figures = document.createElement("span");
  const state = document.createElement("span"), line = document.createElement("div"), bar = document.createElement("div");
  title.className = "title";
  title.dir = "auto";
  title.textContent = about.title || about.id;
  state.className = "state";
  state.textContent = { cut: "interrupted", running: "running", prefill: "prefill", queued: "queued", finished: { length: "finished", eos: "ended", stop: "ended", loop: "stopped in a loop" }[about.finish_reason] ?? "finished" }[about.state] ?? about.state;
  figures.className = "figures";
  const when = about.created ? new Date(about.created * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" }) : "";
  figures.append(state, ` · ${(about.new_tokens ?? 0).toLocaleString()} of ${(about.max_new_tokens ?? 0).toLocaleString()} · ${when}`);
  line.className = "row";
  line.append(figures);
  const isOn = isActive(about);
  if (about.resumable) line.append(button("Resume", () => resume(about.id), "primary", `go ${about.id}`));
  if (isOn) line.append(button("Stop", async () => { await ask(`${GENERATIONS}/${about.id}/cancel`, "POST"); refresh(); }, "stop", `stop ${about.id}`));
  if (!isOn && about.state !== "unreadable") line.append(button("Read", () => read(about.id), "", `read ${about.id}`));
  if (!isOn) line.append(button("Remove", () => remove(about.id), "", `remove ${about.id}`));
  bar.className = "mini";
  bar.append(document.createElement("i"));
  bar.firstChild.style.width = `${100 * (about.new_tokens ?? 0) / Math.max(1, about.max_new_tokens ?? 1)}%`;
  row.append(title, bar, line);
  return row;
}

async function remove(id) {
  if (!(await sure("Remove this text from the server’s disk?", "Remove"))) return;
  await ask(`${GENERATIONS}/${id}`, "DELETE");
  if (run?.id === id) { run.isCut = false; offerResume(); }
  await refresh();
  if (!document.activeElement || document.activeElement === document.body) $("close-past").focus();
}

async function read(id) {
  const about = await opened(id, "Stop it and read the other one?");
  if (!about) return;
  view.push({ tokens: about.tokens, pieces: about.pieces, sources: about.tokens.map(() => ""), steps: about.tokens.map(() => 1) }, true);
  divide(about.pieces);
  run.sawOld = true;
  run.seed = about.seed;
  run.reason = about.finish_reason;
  run.promptTokens = about.prompt_tokens;
  onEnd(about.resumable ? "cut" : "done");
  $("rate").textContent = about.tokens_per_second ? Math.round(about.tokens_per_second) : "–";
  $("length").textContent = about.mean_accepted_length ? about.mean_accepted_length.toFixed(2) : "–";
  view.follows = false;
  $("text").scrollTop = 0;
}

// ---- controls

function fold(isFolded) {
  if (isFolded && $("compose").contains(document.activeElement)) $("text").focus({ preventScroll: true });
  document.body.classList.toggle("folded", isFolded);
  $("show-compose").setAttribute("aria-expanded", String(!isFolded));
}

function open() { $("past").hidden = false; $("past-failure").hidden = true; $("show-past").setAttribute("aria-expanded", "true"); refresh(); $("close-past").focus(); }

function close() {
  const hadFocus = $("past").contains(document.activeElement);
  $("past").hidden = true;
  $("show-past").setAttribute("aria-expanded", "false");
  if (hadFocus) $("show-past").focus();
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = name === "dark" ? "Light" : "Dark";
  speed.dirty();
  lengths.dirty();
}

function switchTheme() {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  kept.set("theme", name);
  theme(name);
}

function tint(isOn) {
  $("tint").checked = isOn;
  $("text").classList.toggle("tinted", isOn);
}

async function copy() {
  try { await navigator.clipboard.writeText(answer()); } catch { // browsers offer the clipboard on https and localhost only
    const area = Object.assign(document.createElement("textarea"), { value: answer() });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  $("copy").textContent = "Copied";
  setTimeout(() => { $("copy").textContent = "Copy"; }, 1500);
}

function download(kind) {
  const name = `longdraft-${run.id ?? "text"}`;
  if (kind === "text") save(`${name}.txt`, [whole()], "text/plain;charset=utf-8");
  if (kind === "tokens") save(`${name}.npy`, npy(view.tokens), "application/octet-stream");
  if (kind === "report") {
    const total = Math.max(1, view.length - view.old);
    save(`${name}.html`, [report({
      title: `longdraft: ${view.length.toLocaleString()} tokens`,
      rows: [["prompt", run.prompt.length > 400 ? `${run.prompt.slice(0, 400)}…` : run.prompt], ["seed", run.seed], ["tokens", view.length.toLocaleString()],
        ["tokens/s", $("rate").textContent], ["times plain decoding", $("gain").textContent], ["tokens per step", $("length").textContent],
        ["exactness", run.stats?.exactness ?? "–"], ["sha256 of the tokens", run.stats?.sha256_tokens ?? "–"]],
      charts: [["Speed", speed.canvas.toDataURL()], ["Accepted length", lengths.canvas.toDataURL()]],
      shares: view.names.map((who, i) => [SOURCES[who] ?? who, `${(100 * view.counts[i] / total).toFixed(1)} %`]),
      stats: run.stats, text: whole(),
    })], "text/html;charset=utf-8");
  }
  $("downloads").open = false;
}

async function saveBook(format, ending) {
  try {
    const title = run.messages ? firstWords(run.prompt) : undefined;
    const reply = await request("/v1/longdraft/export", "POST", { text: whole(), title, format });
    save(`longdraft-${run.id ?? "text"}.${ending}`, [await reply.blob()], reply.headers.get("Content-Type"));
  } catch (error) { showError(error); }
  $("downloads").open = false;
}

function tip(event) {
  const token = event.target.token, box = $("tip");
  box.hidden = token === undefined || !$("tint").checked;
  if (box.hidden) return;
  const { source, place, run: size, token: at } = view.describe(token);
  box.textContent = `token ${at.toLocaleString()}: drafted by ${SOURCES[source] ?? source}${size > 1 ? `, ${place} of ${size} accepted in a row` : ", accepted"}`;
  const frame = $("text").parentElement.getBoundingClientRect();
  box.style.left = `${Math.max(8, Math.min(event.clientX - frame.left, frame.width - 260))}px`;
  box.style.top = `${event.clientY - frame.top + 22}px`;
}

const KEYS = { "/": () => { fold(false); $("prompt").focus(); }, p: () => fold(!document.body.classList.contains("folded")),
  g: () => ($("past").hidden ? open() : close()), t: () => tint(!$("tint").checked), f: () => view.follow(), d: switchTheme,
  "?": () => $("keys").showModal() };

function pressed(event) {
  if (event.isComposing || document.querySelector("dialog[open]")) return;
  if ((event.ctrlKey || event.metaKey) && event.key === "Enter") {
    event.preventDefault();
    if ($("here").contains(event.target)) $("here-go").click();
    else if ($("past").hidden) {
      if (!$("compose").checkValidity()) fold(false); // so that the browser can show what is wrong
      $("compose").requestSubmit();
    }
    return;
  }
  if (event.key === "Escape") { escape(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
  if (KEYS[event.key]) { event.preventDefault(); KEYS[event.key](); }
}

// Close what is open; with nothing open, stop the text.
function escape() {
  const menu = $("downloads");
  if (!$("past").hidden) close();
  else if (!$("here").hidden) takes.hide();
  else if (menu.open) {
    if (menu.contains(document.activeElement)) menu.firstElementChild.focus();
    menu.open = false;
  } else stop();
}

async function dropped(event) {
  event.preventDefault();
  const file = event.dataTransfer?.files[0];
  if (file) $("prompt").value = await file.text();
}

async function start() {
  theme(kept.get("theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  $("compose").addEventListener("submit", (event) => { event.preventDefault(); generate(); });
  for (const each of document.querySelectorAll("[data-tokens]")) each.addEventListener("click", () => { $("max_tokens").value = each.dataset.tokens; });
  const on = (id, action) => $(id).addEventListener("click", action);
  on("dice", () => { $("seed").value = Math.floor(Math.random() * 2 ** 31); });
  on("stop-run", stop);
  on("answer", answerNow);
  // The header stays above the page on narrow screens: nothing scrolls under it.
  new ResizeObserver(() => { document.documentElement.style.scrollPaddingTop = `${document.querySelector(".bar").offsetHeight + 4}px`; }).observe(document.querySelector(".bar"));
  on("resume", () => resumeShown().catch(showError));
  on("copy", copy);
  on("save-text", () => download("text"));
  on("save-markdown", () => saveBook("markdown", "md"));
  on("save-epub", () => saveBook("epub", "epub"));
  on("save-tokens", () => download("tokens"));
  on("save-report", () => download("report"));
  on("follow", () => view.follow());
  on("show-compose", KEYS.p);
  on("show-past", KEYS.g);
  on("close-past", close);
  on("theme", switchTheme);
  on("help", KEYS["?"]);
  $("tint").addEventListener("change", () => tint($("tint").checked));
  $("text").addEventListener("pointermove", tip);
  $("text").addEventListener("pointerleave", () => { $("tip").hidden = true; });
  document.addEventListener("keydown", pressed);
  document.addEventListener("click", (event) => { if (!$("downloads").contains(event.target)) $("downloads").open = false; });
  $("prompt").addEventListener("dragover", (event) => event.preventDefault());
  $("prompt").addEventListener("drop", dropped);
  setInterval(() => { if (!document.hidden && !$("past").hidden) refresh(); }, POLL_MS);
  legend();
  try {
    const about = await ask("/v1/longdraft/status");
    window.keepsJournals = about.journals;
    $("about").textContent = `${about.model} · ${about.kernels} on ${about.device} · ${about.exactness}`;
    $("drafter").replaceChildren(...about.drafters.map((name) => new Option(name, name, name === about.drafter, name === about.drafter)));
    $("chat-row").hidden = $("tools-row").hidden = !about.has_chat_template;
    $("chat").checked = about.is_tuned_for_chat;
    $("max_tokens").max = about.max_model_len - 1;
    for (const name of ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"]) if (about.defaults[name] !== undefined) $(name).placeholder = about.defaults[name];
  } catch (error) { showError(error); }
  await refresh();
}

start();

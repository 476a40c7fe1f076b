// The text, token by token. Only the part near the visible area is in the document: a text of 100,000 tokens has some
// hundred blocks, of which a few have their tokens, and the others only their height.

const BLOCK = 260; // tokens after which the next line break starts a new block
const LARGEST = 1200; // maximum tokens of a block
const NEAR = "1200px"; // above and below the visible area
const ORDER = ["", "self", "heads", "suffix", "ngram", "draft"]; // source -> style s1 .. s5; others are s6

export const styleOf = (source) => (source === "" ? 0 : ORDER.indexOf(source) > 0 ? ORDER.indexOf(source) : 6);

export class TextView {
  constructor(element, onFollow) {
    this.element = element;
    this.onFollow = onFollow;
    this.observer = new IntersectionObserver((entries) => this.#seen(entries), { root: element, rootMargin: `${NEAR} 0px` });
    element.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    new ResizeObserver(() => this.#resized()).observe(element);
    this.clear();
  }

  clear() {
    this.observer.disconnect();
    this.element.replaceChildren();
    this.pieces = [];
    this.tokens = [];
    this.sources = []; // index into this.names
    this.runs = []; // position in the accepted run, from 1; 0: the model's own token
    this.ends = []; // whether the run ends here
    this.names = [""];
    this.counts = [0];
    this.old = 0; // tokens generated in an earlier run
    this.blocks = [];
    this.follows = true;
    this.shown = 0; // tokens that are in blocks
    this.thoughtEnd = 0; // tokens of the thought, which is folded; Infinity: it goes on
    this.folded = null; // its element
    this.width = this.element.clientWidth;
  }

  prompt(text) {
    const shown = document.createElement("div");
    shown.className = text.length > 700 ? "prompt long" : "prompt";
    shown.dir = "auto";
    shown.textContent = text;
    this.element.prepend(shown);
  }

  get length() { return this.tokens.length; }
  get string() { return this.pieces.join(""); }

  // The first `end` tokens are the thought. Call it before the tokens behind them are drawn.
  think(end) {
    this.thoughtEnd = end;
    if (!this.folded) this.#foldThought();
  }

  #foldThought() {
    this.folded = document.createElement("details");
    this.folded.className = "thinking";
    const summary = document.createElement("summary");
    summary.textContent = "Thought";
    this.folded.append(summary, ...this.blocks.map((block) => block.element));
    this.element.append(this.folded);
  }

  // Add a chunk's details. They are drawn with the next frame.
  push({ tokens, pieces, sources, steps }, isOld = false) {
    let at = 0;
    for (const size of steps) {
      for (let i = 0; i < size; i++, at++) {
        const source = sources[at];
        let index = this.names.indexOf(source);
        if (index < 0) { index = this.names.push(source) - 1; this.counts.push(0); }
        this.counts[index]++;
        this.tokens.push(tokens[at]);
        this.pieces.push(pieces[at]);
        this.sources.push(index);
        this.runs.push(source ? i + 1 : 0);
        this.ends.push(!source || at + 1 >= tokens.length || !sources[at + 1] || i + 1 === size);
      }
    }
    if (isOld) this.old = this.tokens.length;
    this.frame ??= requestAnimationFrame(() => { this.frame = null; this.#draw(); });
  }

  flush() { this.#draw(); }

  // Everything that is needed to show this text again.
  snapshot() {
    this.#draw();
    const { pieces, tokens, sources, runs, ends, names, counts, old, thoughtEnd } = this;
    return { pieces, tokens, sources, runs, ends, names, counts, old, thoughtEnd };
  }

  show(promptText, snapshot) {
    this.clear();
    this.prompt(promptText);
    Object.assign(this, snapshot);
    if (this.thoughtEnd) this.#foldThought();
    this.#draw();
  }

  // The token whose text is at an offset of a node; null outside the tokens.
  tokenAt(node, offset) {
    const element = (node.nodeType === Node.TEXT_NODE ? node.parentElement : node).closest?.(".block");
    if (!element?.block?.isLive) return null;
    const before = document.createRange();
    before.setStart(element, 0);
    before.setEnd(node, offset);
    let length = before.toString().length, token = element.block.start;
    while (token < element.block.end && length >= this.pieces[token].length) length -= this.pieces[token++].length;
    return Math.min(token, this.tokens.length - 1);
  }

  // Some words after a token's place.
  around(token) { return this.pieces.slice(token, token + 8).join("").replace(/\s+/g, " ").trim().slice(0, 40); }

  follow() {
    this.follows = true;
    this.#toEnd();
    this.onFollow(true);
  }

  #draw() {
    while (this.shown < this.tokens.length) {
      let block = this.blocks.at(-1);
      if (!block || block.isFull || this.shown === this.thoughtEnd) block = this.#begin();
      const from = this.shown;
      while (this.shown < this.tokens.length && !block.isFull) {
        block.end = ++this.shown;
        const size = block.end - block.start;
        block.isFull = size >= LARGEST || (size >= BLOCK && this.pieces[this.shown - 1].includes("\n")) || this.shown === this.thoughtEnd;
      }
      if (block.isLive) block.element.append(this.#spans(from, block.end));
    }
    if (this.follows) this.#toEnd();
  }

  #begin() {
    const element = document.createElement("div");
    element.className = "block";
    element.dir = "auto";
    const block = { element, start: this.shown, end: this.shown, isFull: false, isLive: true, height: 0 };
    element.block = block;
    this.blocks.push(block);
    (this.shown < this.thoughtEnd ? this.folded : this.element).append(element);
    this.observer.observe(element);
    return block;
  }

  #spans(start, end) {
    const part = document.createDocumentFragment();
    for (let i = start; i < end; i++) {
      if (!this.pieces[i]) continue;
      const style = styleOf(this.names[this.sources[i]]);
      if (!style) { part.append(this.pieces[i]); continue; }
      const span = document.createElement("span");
      span.className = `g s${style}${this.runs[i] === 1 ? " first" : ""}${this.ends[i] ? " last" : ""}`;
      span.textContent = this.pieces[i];
      span.token = i;
      part.append(span);
    }
    return part;
  }

  #seen(entries) {
    for (const { target, isIntersecting } of entries) {
      const block = target.block;
      if (isIntersecting === block.isLive) continue;
      if (isIntersecting) {
        target.append(this.#spans(block.start, block.end));
        target.style.height = "";
      } else if (block.isFull) { // the last block still grows
        target.style.height = `${target.offsetHeight}px`;
        target.replaceChildren();
      } else continue;
      block.isLive = isIntersecting;
    }
  }

  #toEnd() {
    this.isOurs = true;
    this.element.scrollTop = this.element.scrollHeight;
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.element;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < clientHeight * 0.45;
    if (this.isOurs) { this.isOurs = false; return; }
    if (isAtEnd !== this.follows) { this.follows = isAtEnd; this.onFollow(isAtEnd); }
  }

  #resized() {
    const width = this.element.clientWidth;
    if (width === this.width || !width) return;
    for (const { element, isLive } of this.blocks) { // estimate the height at the new width
      if (!isLive) element.style.height = `${Math.round(parseFloat(element.style.height) * this.width / width)}px`;
    }
    this.width = width;
    if (this.follows) this.#toEnd();
  }

  describe(i) {
    const source = this.names[this.sources[i]];
    let run = i;
    while (!this.ends[run]) run++;
    return { source, place: this.runs[i], run: this.runs[run], token: i + 1 };
  }
}

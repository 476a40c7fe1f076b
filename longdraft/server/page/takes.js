// Takes of one text: cut it at a token, go on with another seed or after words of your own, and switch between all takes.

const $ = (id) => document.getElementById(id);

// The position (node, offset) in the text below a click; browsers have two functions for it.
function caretAt(x, y) {
  if (document.caretPositionFromPoint) {
    const found = document.caretPositionFromPoint(x, y);
    return found && { node: found.offsetNode, offset: found.offset };
  }
  const range = document.caretRangeFromPoint?.(x, y);
  return range && { node: range.startContainer, offset: range.startOffset };
}

export class Takes {
  // on.go(token, words): go on after the first `token` tokens and the words; on.show(take): show a take.
  // on.seed(words): the seed of the next take
  constructor(view, on) {
    this.view = view;
    this.on = on;
    this.clear();
    view.element.addEventListener("click", (event) => this.#clicked(event));
    $("here-words").addEventListener("input", () => this.#label());
    $("here-go").addEventListener("click", () => { const { token } = this; this.hide(); on.go(token, $("here-words").value); });
    $("here").addEventListener("keydown", (event) => { if (event.key === "Escape" && !event.isComposing) { event.stopPropagation(); this.hide(); } });
  }

  clear() {
    this.all = [];
    this.current = null;
    this.hide();
    this.#list();
  }

  hide() {
    if ($("here").contains(document.activeElement)) this.view.element.focus({ preventScroll: true });
    $("here").hidden = true;
  }

  // Keep the text on display as a take. `about` is what the page needs to show it again.
  keep(about) {
    if (!this.current) this.all.push((this.current = { number: this.all.length + 1 }));
    Object.assign(this.current, { ...about, text: this.view.snapshot() });
    this.#list();
  }

  // This take is on display.
  select(take) {
    this.current = take;
    this.#list();
  }

  // Back to the takes that there were.
  restore(all, current) {
    this.all = all;
    this.select(current);
  }

  // A new take begins.
  begin() {
    this.current = null;
    this.#list();
  }

  #clicked(event) {
    if (!this.view.length || String(getSelection())) return this.hide();
    const caret = caretAt(event.clientX, event.clientY), token = caret && this.view.tokenAt(caret.node, caret.offset);
    if (token === null || token === undefined) return this.hide();
    this.token = token;
    $("here-words").value = "";
    $("here-at").textContent = `Cut before token ${(token + 1).toLocaleString()}: “${this.view.around(token)}”`;
    this.#label();
    const frame = this.view.element.parentElement.getBoundingClientRect(), box = $("here");
    box.hidden = false;
    box.style.left = `${Math.max(8, Math.min(event.clientX - frame.left, frame.width - box.offsetWidth - 8))}px`;
    box.style.top = `${Math.min(event.clientY - frame.top + 18, frame.height - box.offsetHeight - 8)}px`;
  }

  #label() {
    const words = $("here-words").value;
    $("here-go").textContent = words ? "Go on after these words" : `Another take (seed ${this.on.seed(words)})`;
  }

  #list() {
    const list = $("takes");
    list.hidden = this.all.length === 0;
    list.replaceChildren(...this.all.map((take) => {
      const made = Object.assign(document.createElement("button"), { type: "button",
        textContent: `Take ${take.number}`, title: `seed ${take.seed}${take.from ? `, from token ${take.from + 1}` : ""}` });
      made.setAttribute("aria-pressed", String(take === this.current));
      made.addEventListener("click", () => this.on.show(take));
      return made;
    }));
  }
}

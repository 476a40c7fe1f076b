// Curves over context length on a canvas: one line, and plain decoding for comparison where it is known.

const MAX_POINTS = 600; // beyond that, points are merged in pairs

export class Chart {
  constructor(canvas, { unit, digits = 0, line = "--self", plain = null, floor = null, describe }) {
    Object.assign(this, { canvas, unit, digits, line, plain, floor, describe });
    // points: [context, value, plain or null]
    this.at = null;
    this.clear();
    canvas.addEventListener("pointermove", (event) => { this.at = event.offsetX; this.dirty(); });
    canvas.addEventListener("pointerleave", () => { this.at = null; this.dirty(); });
    new ResizeObserver(() => this.dirty()).observe(canvas);
  }

  clear() {
    this.points = [];
    this.stride = 1; // values per point
    this.fresh = []; // values since the last point
    this.dirty();
  }

  add(context, value, plain = null) {
    const last = this.fresh.at(-1) ?? this.points.at(-1);
    if (!Number.isFinite(value) || value <= 0 || (last && context <= last[0])) return;
    this.fresh.push([context, value, plain]);
    if (this.fresh.length < this.stride) return;
    this.points.push(mean(this.fresh));
    this.fresh = [];
    if (this.points.length > MAX_POINTS) {
      const [first, ...rest] = this.points; // the first point stays
      this.points = [first];
      for (let i = 0; i < rest.length; i += 2) this.points.push(mean(rest.slice(i, i + 2)));
      this.stride *= 2;
    }
    this.dirty();
  }

  dirty() {
    this.timer ??= setTimeout(() => { this.timer = null; requestAnimationFrame(() => this.draw()); }, 120);
  }

  draw() {
    const { canvas, points } = this, scale = devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const g = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const ink = color("--ink"), soft = color("--soft"), grid = color("--line"), accent = `rgb(${color(this.line)})`;
    g.setTransform(scale, 0, 0, scale, 0, 0);
    g.clearRect(0, 0, width, height);
    g.font = "12px system-ui, sans-serif";
    const left = 40, right = width - 8, top = 10, bottom = height - 20;
    const smooth = smoothed(points);
    const high = nice(1.08 * Math.max(1e-9, ...smooth.map((p) => Math.max(p[1], p[2] ?? 0))));
    const from = points.length ? points[0][0] : 0, to = points.length > 1 ? points.at(-1)[0] : from + 1;
    const x = (value) => left + (value - from) / (to - from) * (right - left);
    const y = (value) => bottom - value / high * (bottom - top);
    g.fillStyle = soft; g.strokeStyle = grid; g.lineWidth = 1;
    g.textAlign = "right"; g.textBaseline = "middle";
    for (let i = 0; i <= 2 && points.length > 1; i++) {
      const value = high * i / 2;
      line(g, [[left, y(value)], [right, y(value)]]);
      g.fillText(short(value, high < 10 ? 1 : 0), left - 6, y(value));
    }
    if (smooth.length < 2) {
      g.textAlign = "center";
      g.fillText(points.length ? "" : "appears while text is generated", (left + right) / 2, (top + bottom) / 2);
      return;
    }
    g.textBaseline = "top";
    g.textAlign = "left"; g.fillText(short(from), left, bottom + 5);
    g.textAlign = "right"; g.fillText(`${short(to)} tokens`, right, bottom + 5);
    const known = smooth.filter((p) => p[2] !== null);
    if (this.plain && known.length > 1) {
      g.fillStyle = accent; g.globalAlpha = 0.12;
      g.beginPath();
      for (const p of known) g.lineTo(x(p[0]), y(p[1]));
      for (const p of known.toReversed()) g.lineTo(x(p[0]), y(p[2]));
      g.fill();
      g.globalAlpha = 1; g.strokeStyle = ink; g.lineWidth = 1.5; g.setLineDash([5, 4]);
      line(g, known.map((p) => [x(p[0]), y(p[2])]));
      g.setLineDash([]);
      const end = known.at(-1), above = end[2] < end[1] ? 14 : -14;
      g.fillStyle = ink; g.textBaseline = "middle";
      halo(g, this.plain, right - 2, Math.min(bottom - 8, Math.max(top + 8, y(end[2]) + above)), color("--paper"));
    }
    if (this.floor !== null) {
      g.strokeStyle = ink; g.lineWidth = 1.5; g.setLineDash([5, 4]);
      line(g, [[left, y(this.floor)], [right, y(this.floor)]]);
      g.setLineDash([]);
    }
    g.strokeStyle = accent; g.lineWidth = 2.2; g.lineJoin = "round";
    line(g, smooth.map((p) => [x(p[0]), y(p[1])]));
    const end = smooth.at(-1);
    dot(g, x(end[0]), y(end[1]), accent);
    if (this.at !== null) this.#crosshair(g, smooth, x, y, { ink, accent, paper: color("--paper"), left, right, top, bottom });
    canvas.setAttribute("aria-label", this.describe(end[1], end[2], to));
  }

  #crosshair(g, points, x, y, { ink, accent, paper, left, right, top, bottom }) {
    const near = points.reduce((a, b) => (Math.abs(x(b[0]) - this.at) < Math.abs(x(a[0]) - this.at) ? b : a));
    g.strokeStyle = ink; g.globalAlpha = 0.35; g.lineWidth = 1;
    line(g, [[x(near[0]), top], [x(near[0]), bottom]]);
    g.globalAlpha = 1;
    dot(g, x(near[0]), y(near[1]), accent);
    const beside = near[2] === null ? "" : ` · plain ${near[2].toFixed(this.digits)}`;
    g.fillStyle = ink; g.textBaseline = "top"; g.textAlign = x(near[0]) > (left + right) / 2 ? "right" : "left";
    halo(g, `${near[1].toFixed(this.digits)} ${this.unit}${beside} at ${short(near[0])}`,
      x(near[0]) + (g.textAlign === "left" ? 6 : -6), top, paper);
  }
}

export const short = (value, digits = 0) => (value >= 10000 ? `${+(value / 1000).toFixed(value < 100000 ? 1 : 0)}K` : value.toFixed(digits));

function line(g, points) {
  g.beginPath();
  for (const [x, y] of points) g.lineTo(x, y);
  g.stroke();
}

function dot(g, x, y, color) {
  g.fillStyle = color;
  g.beginPath();
  g.arc(x, y, 3.6, 0, 2 * Math.PI);
  g.fill();
}

function halo(g, text, x, y, paper) {
  const fill = g.fillStyle;
  g.strokeStyle = paper; g.lineWidth = 4; g.lineJoin = "round";
  g.strokeText(text, x, y);
  g.fillStyle = fill;
  g.fillText(text, x, y);
}

// Merges several points.
function mean(points) {
  const of = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
  return [points.at(-1)[0], of(points.map((p) => p[1])), of(points.map((p) => p[2]).filter((v) => v !== null))];
}

// Running means, for readable curves. Plain decoding is measured at intervals; its last value is repeated between.
function smoothed(points) {
  const reach = Math.max(1, Math.round(points.length / 40)), found = [];
  let plain = points.find((p) => p[2] !== null)?.[2] ?? null;
  const plains = points.map((p) => (plain = p[2] ?? plain));
  let sum = 0, beside = 0;
  for (let i = 0; i < points.length; i++) {
    sum += points[i][1];
    beside += plains[i];
    if (i >= reach) { sum -= points[i - reach][1]; beside -= plains[i - reach]; }
    const size = Math.min(i + 1, reach);
    found.push([points[i][0], sum / size, plains[i] === null ? null : beside / size]);
  }
  return found;
}

// The smallest of 1, 2, 2.5, 5, 10 times a power of ten that is large enough.
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((m) => m * power >= value) * power;
}

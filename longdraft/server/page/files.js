// Downloads: the text, the token ids as a NumPy file, and a self-contained report.

export function save(name, parts, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(parts, { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// A .npy file of int32, as `longdraft generate --tokens-out` writes it.
export function npy(tokens) {
  const shape = `{'descr': '<i4', 'fortran_order': False, 'shape': (${tokens.length},), }`;
  const text = shape.padEnd(Math.ceil((10 + shape.length + 1) / 64) * 64 - 11) + "\n";
  const head = new Uint8Array(10 + text.length);
  head.set([0x93, 78, 85, 77, 80, 89, 1, 0, text.length & 255, text.length >> 8]);
  for (let i = 0; i < text.length; i++) head[10 + i] = text.charCodeAt(i);
  const body = new DataView(new ArrayBuffer(4 * tokens.length));
  tokens.forEach((token, i) => body.setInt32(4 * i, token, true));
  return [head, body.buffer];
}

const safe = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);

export function report({ title, rows, charts, shares, stats, text }) {
  const table = (pairs) => `<table>${pairs.map(([a, b]) => `<tr><th>${safe(a)}<td>${safe(b)}`).join("")}</table>`;
  return `<!doctype html><html lang="en"><meta charset="utf-8"><title>${safe(title)}</title><style>
body{font:16px/1.55 system-ui,sans-serif;max-width:52em;margin:3em auto;padding:0 1em;color:#171b21}
th{text-align:left;font-weight:400;color:#5b6572;padding:.2em 2em .2em 0}td{font-variant-numeric:tabular-nums}
img{max-width:100%;margin:.5em 0}pre{white-space:pre-wrap;font:17px/1.7 Georgia,serif}summary{cursor:pointer}</style>
<h1>${safe(title)}</h1>${table(rows)}
${charts.map(([name, image]) => `<h2>${safe(name)}</h2><img alt="${safe(name)}" src="${image}">`).join("")}
<h2>Drafters</h2>${table(shares)}
<details><summary>All statistics</summary><pre>${safe(JSON.stringify(stats, null, 2))}</pre></details>
<h2>Text</h2><pre>${safe(text)}</pre></html>`;
}

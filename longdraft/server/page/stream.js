// Reads the server's streams: objects from `data:` lines, progress from comments.

export class ApiError extends Error {
  constructor(message, code, status) {
    super(message);
    this.code = code;
    this.status = status;
  }
}

// Calls on.chunk(object) and on.progress(object) until the stream ends. Throws ApiError for an error of the server.
export async function stream(url, body, on, signal) {
  const reply = await fetch(url, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  });
  if (!reply.ok) throw await refusal(reply);
  on.open?.(reply.headers.get("X-Generation-Id"));
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith(": progress ")) on.progress?.(JSON.parse(line.slice(11)));
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new ApiError(chunk.error.message, chunk.error.code);
      on.chunk(chunk);
    }
  }
  throw new ApiError("the connection closed before the text was finished", "cut");
}

export const ask = async (url, method, body) => (await request(url, method, body)).json();

export async function request(url, method = "GET", body) {
  const reply = await fetch(url, {
    method, ...(body ? { body: JSON.stringify(body), headers: { "Content-Type": "application/json" } } : {}),
  });
  if (!reply.ok) throw await refusal(reply);
  return reply;
}

async function refusal(reply) {
  const error = (await reply.json().catch(() => ({}))).error ?? {};
  return new ApiError(error.message ?? `the server answered ${reply.status}`, error.code, reply.status);
}

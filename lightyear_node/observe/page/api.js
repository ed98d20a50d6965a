// Requests to the node.  Every response is JSON; an error has a text and perhaps a hint.

const TIMEOUT_MS = 6000;

export class ApiError extends Error {
  constructor(status, body) {
    super(body.error ?? `the node answered ${status}`);
    this.status = status;
    this.hint = body.hint;
  }
}

// A proxy in front of a stopped node answers with 502 to 504.
export function isOffline(problem) {
  return !(problem instanceof ApiError) || problem.status >= 502;
}

export async function get(prefix, path) {
  const response = await fetch(`${prefix}/${path}`, {
    cache: "no-store",
    signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  if (!response.ok) throw new ApiError(response.status, await response.json().catch(() => ({})));
  return response.json();
}

// Asking the node.  Every answer is JSON; a refusal carries words of its own.

const PATIENCE_MS = 6000;

export class Refused extends Error {
  constructor(status, said) {
    super(said.error ?? `the node answered ${status}`);
    this.status = status;
    this.hint = said.hint;
  }
}

// 502 to 504 are said by whatever stands in front of a node that is not there.
export function isGone(problem) {
  return !(problem instanceof Refused) || problem.status >= 502;
}

export async function ask(prefix, question) {
  const answer = await fetch(`${prefix}/${question}`, {
    cache: "no-store",
    signal: AbortSignal.timeout(PATIENCE_MS),
  });
  if (!answer.ok) throw new Refused(answer.status, await answer.json().catch(() => ({})));
  return answer.json();
}

// Formats numbers, times and states for people.

export const FATES = {
  accepted: { mark: "✓", word: "accepted" },
  rejected: { mark: "✗", word: "rejected" },
  missing: { mark: "–", word: "missing" },
};
export const NOT_JUDGED = { mark: "·", word: "not judged yet" };

export const PHASES = {
  starting: "is starting",
  observing: "is looking for the other sites",
  training: "is training on its own data",
  sealing: "is signing its update",
  collecting: "is collecting the others' updates",
  judging: "is judging the others' updates",
  merging: "is merging the accepted updates",
  paused: "is paused by its operator",
  finished: "has finished all rounds",
};

// The journal stores the largest float for values that are not finite.
export function number(value, digits = 2) {
  if (typeof value !== "number") return "none";
  if (value === Number.MAX_VALUE) return "not finite";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e5 || size < 10 ** -digits)) return value.toExponential(1);
  return value.toFixed(digits);
}

export function times(count) {
  return count === 1 ? "once" : `${count} times`;
}

export function counted(count, one, many) {
  return `${count} ${count === 1 ? one : many}`;
}

export function listed(names, most = 4) {
  if (names.length <= most) return names.join(", ");
  return `${names.slice(0, most).join(", ")} and ${names.length - most} more`;
}

export function clock(when) {
  return new Date(when).toLocaleTimeString([], { hour12: false });
}

export function moment(when) {
  const date = new Date(when);
  if (Number.isNaN(date.getTime())) return String(when);
  const today = new Date().toDateString() === date.toDateString();
  return today ? clock(date) : `${date.toLocaleDateString()} ${clock(date)}`;
}

export function ago(milliseconds) {
  const seconds = Math.max(0, Math.round(milliseconds / 1000));
  if (seconds < 90) return `${seconds} s ago`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes} min ago` : `${Math.round(minutes / 60)} h ago`;
}

export function mebibytes(bytes) {
  return `${(bytes / 2 ** 20).toFixed(1)} MiB`;
}

export function capitalised(text) {
  return text ? text[0].toUpperCase() + text.slice(1) : "";
}

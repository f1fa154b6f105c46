// The query of a path.

/** Return the fields that are given, as they follow a path. */
export function query(fields: Record<string, string | undefined>): string {
  const given = Object.entries(fields).filter((field): field is [string, string] => field[1] !== undefined);
  return given.length > 0 ? `?${new URLSearchParams(given)}` : "";
}

// REST calls with one observer token. The token travels in the Authorization header.

/** Error response of the engine, or a missing response (`status` 0). */
export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Api {
  #token;

  constructor(token) {
    this.#token = token;
  }

  /** Returns `data` of the response. */
  async get(path, query = {}) {
    const url = new URL(path, location.origin);
    for (const [key, value] of Object.entries(query)) {
      if (value !== undefined && value !== null) url.searchParams.set(key, value);
    }
    let response;
    try {
      response = await fetch(url, {
        headers: { authorization: `Bearer ${this.#token}` },
        cache: 'no-store',
        signal: AbortSignal.timeout(20_000),
      });
    } catch {
      throw new ApiError(0, 'no_answer', 'The gateway is unavailable');
    }
    const body = await response.json().catch(() => null);
    if (!response.ok || body?.ok !== true) {
      const error = body?.error ?? {};
      throw new ApiError(response.status, error.code ?? 'unknown', error.message ?? `HTTP ${response.status}`);
    }
    return body.data;
  }

  /** Opens the live socket. Browsers can set no header, and proxies log URLs, so the token is in a subprotocol. */
  socket() {
    const url = new URL('/v1/ws', location.origin.replace(/^http/, 'ws'));
    url.searchParams.set('origin_client', 'console');
    return new WebSocket(url, ['relay.v1', `relay.token.${this.#token}`]);
  }
}

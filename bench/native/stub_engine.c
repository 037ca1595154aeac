// An engine without a model, fast enough to be no part of what is measured: prefill and decode, one thread, epoll.
//
//   stub_engine [--chunks 32] [--interval-us 1000] [--bytes-per-token 4] [--kind backhaul|vllm]
//
// Prints the port it has taken on 127.0.0.1. An answer has `chunks` tokens; streamed, one event each, `interval-us`
// apart (0: all at once). A prompt has as many tokens as its request has bytes over `bytes-per-token`, or those that
// the request brings along. Bodies are not parsed: their keys are found as the compact JSON that routers write.
//
// As one of vLLM (without bidirectional transfer) it tells token ids only who asks for them, has no hashes of blocks,
// and its decode side offers none. Any other GET than those it knows is answered as if a completion were wanted.
#include "net.h"

#include <signal.h>

#define MAX_TOKENS 65536
#define MAX_PROMPT (MAX_TOKENS / 2 - 1)
#define MOST_CHUNKS 16384
#define BLOCK_TOKENS 16
#define FIRST_ID 10000     // all ids have five digits, so that those of a prompt are the start of one text
#define FIRST_BLOCK 1000   // likewise four
#define HASH_TEXT 35       // bytes of a block's hash: 32 digits, quotes and comma
#define ID_TEXT 6
#define BLOCK_TEXT 5
#define MODELS_OF(owner) \
  "{\"object\":\"list\",\"data\":[{\"id\":\"stub\",\"object\":\"model\",\"owned_by\":\"" owner "\",\"max_model_len\":131072}]}"

typedef struct Connection {
  int fd;
  Buffer in, out;
  size_t sent;
  int blocked;               // waits until it can send more
  enum { CHAT, COMPLETION, GENERATE } kind;
  int usage, offers;
  int tells_ids;             // in the way of vLLM: of the prompt once, of the answer with every piece
  enum { NO_NOTE, ALL, OUTPUT } note;  // OUTPUT: who asked knows the prompt's ids
  int left;                  // events still to come; 0 when no stream runs
  int num_tokens;            // of prompt and answer
  uint64_t due;
  struct Connection *next;   // in the queue of streams
  int dead;
} Connection;

static int epoll, port, num_chunks, bytes_per_token, is_vllm;
static uint64_t interval_ns, num_requests;
static char *id_text, *block_text, *hash_text;
// Streams by the time of their next event, or nearly: all have the same interval, so whoever is served goes to the end.
// What was late for one event is not late for the next, so that as many are due a second whatever the machine does.
static Connection *queue, **queue_end = &queue;
static Connection *graveyard;

typedef struct {
  const char *at;
  size_t len;
} Text;

static Text text_of(const char *body, size_t len, const char *key) {
  const char *at = memmem(body, len, key, strlen(key));
  if (!at) return (Text){0};
  at += strlen(key);
  const char *end = memchr(at, ']', len - (size_t)(at - body));
  return end ? (Text){at, (size_t)(end - at)} : (Text){0};
}

static int has(const char *body, size_t len, const char *text) { return memmem(body, len, text, strlen(text)) != NULL; }

static void make_texts(void) {
  id_text = malloc(MAX_TOKENS * ID_TEXT + 1);
  block_text = malloc((MAX_TOKENS / BLOCK_TOKENS + 2) * BLOCK_TEXT + 1);
  hash_text = malloc((MAX_TOKENS / BLOCK_TOKENS + 2) * HASH_TEXT + 1);
  if (!id_text || !block_text || !hash_text) die("memory");
  for (int i = 0; i < MAX_TOKENS; i++) sprintf(id_text + i * ID_TEXT, "%05d,", FIRST_ID + i);
  for (int i = 0; i < MAX_TOKENS / BLOCK_TOKENS + 2; i++) {
    sprintf(block_text + i * BLOCK_TEXT, "%04d,", FIRST_BLOCK + i);
    sprintf(hash_text + i * HASH_TEXT, "\"%032x\",", FIRST_BLOCK + i);
  }
}

static Text ids(int num_tokens) { return (Text){id_text, (size_t)num_tokens * ID_TEXT - 1}; }

static void put_text(Buffer *b, Text text) { put(b, text.at, text.len); }

static void put_params(Buffer *b, int prefill, int num_tokens) {
  size_t blocks = (size_t)(num_tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
  putf(b, "{\"do_remote_prefill\":%s,\"do_remote_decode\":%s,\"remote_block_ids\":[[", prefill ? "true" : "false",
       prefill ? "false" : "true");
  put(b, block_text, blocks * BLOCK_TEXT - 1);
  puts_to(b, "]],");
  if (!is_vllm) {
    puts_to(b, "\"remote_block_hashes\":[");
    put(b, hash_text, blocks * HASH_TEXT - 1);
    putf(b, "],\"remote_block_size\":%d,\"kv_layout\":\"stub\",", BLOCK_TOKENS);
  }
  putf(b,
       "\"remote_engine_id\":\"stub-%d\",\"remote_request_id\":\"request-%llu\",\"remote_host\":\"127.0.0.1\","
       "\"remote_port\":%d,\"tp_size\":1,\"remote_num_tokens\":%d,",
       port, (unsigned long long)num_requests, port, num_tokens);
  if (is_vllm)
    puts_to(b, "\"remote_prefill_cached_tokens\":0,\"transfer_mode\":\"pull\"}");
  else if (prefill)
    puts_to(b, "\"remote_prefill_cached_tokens\":0,\"remote_prefill_pulled_tokens\":0}");
  else
    puts_to(b, "\"remote_blocks_ttl\":480.0}");
}

static void put_usage(Buffer *b, int prompt, int output) {
  putf(b, "\"usage\":{\"prompt_tokens\":%d,\"completion_tokens\":%d,\"total_tokens\":%d}", prompt, output,
       prompt + output);
}

static void respond(Connection *c, const Buffer *body) {
  putf(&c->out, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", body->len);
  put(&c->out, body->data, body->len);
}

static void put_chunk(Connection *c, const Buffer *event) {
  putf(&c->out, "%zx\r\n", event->len);
  put(&c->out, event->data, event->len);
  puts_to(&c->out, "\r\n");
}

// What the answer's choice says, in the words of the endpoint: `num_tokens` times the same.
static void put_said(const Connection *c, Buffer *b, const char *chat_key, int num_tokens) {
  if (c->kind == GENERATE) {
    puts_to(b, "\"token_ids\":[");
    put_text(b, ids(num_tokens));
    puts_to(b, "]");
    return;
  }
  if (c->kind == CHAT) putf(b, "\"%s\":{%s\"content\":\"", chat_key, *chat_key == 'm' ? "\"role\":\"assistant\"," : "");
  if (c->kind == COMPLETION) puts_to(b, "\"text\":\"");
  for (int i = 0; i < num_tokens; i++) puts_to(b, " word");
  puts_to(b, c->kind == CHAT ? "\"}" : "\"");
}

static void put_ids(const Connection *c, Buffer *b, int num_tokens) {
  if (!c->tells_ids || c->kind == GENERATE) return;
  puts_to(b, ",\"token_ids\":[");
  put_text(b, ids(num_tokens));
  puts_to(b, "]");
}

static void put_prompt_ids(Buffer *b, Text prompt) {
  puts_to(b, ",\"prompt_token_ids\":[");
  put_text(b, prompt);
  puts_to(b, "]");
}

static void put_note(Buffer *b, const Text *prompt, int num_output) {
  puts_to(b, ",\"token_note\":{");
  if (prompt) {
    puts_to(b, "\"num_cached_tokens\":0,\"prompt_token_ids\":[");
    put_text(b, *prompt);
    puts_to(b, num_output ? "]," : "]");
  }
  if (num_output) {
    puts_to(b, "\"token_ids\":[");
    put_text(b, ids(num_output));
    puts_to(b, "]");
  }
  puts_to(b, "}");
}

static void open_event(const Connection *c, Buffer *e) {
  putf(e, "data: {\"id\":\"stub-1\",\"object\":\"%s\",", c->kind == CHAT ? "chat.completion.chunk" : "text_completion");
  puts_to(e, "\"created\":1764400000,\"model\":\"stub\",\"choices\":[{\"index\":0,");
}

// The next event of a stream; with the last token everything that ends the answer.
static void go_on(Connection *c) {
  static Buffer event;
  event.len = 0;
  c->left--;
  open_event(c, &event);
  put_said(c, &event, "delta", 1);
  put_ids(c, &event, 1);
  putf(&event, ",\"logprobs\":null,\"finish_reason\":%s}]", c->left ? "null" : "\"stop\"");
  if (!c->left) {
    if (c->offers) {
      puts_to(&event, ",\"kv_transfer_params\":");
      put_params(&event, 0, c->num_tokens - 1);
    }
    if (c->note) put_note(&event, NULL, num_chunks);
  }
  puts_to(&event, "}\n\n");
  put_chunk(c, &event);
  if (c->left) return;
  event.len = 0;
  if (c->usage) {
    puts_to(&event, "data: {\"id\":\"stub-1\",\"model\":\"stub\",\"choices\":[],");
    put_usage(&event, c->num_tokens - num_chunks, num_chunks);
    puts_to(&event, "}\n\n");
  }
  puts_to(&event, "data: [DONE]\n\n");
  put_chunk(c, &event);
  puts_to(&c->out, "0\r\n\r\n");
}

// Every kind of stream starts with an event that says nothing yet, as chats do: it brings the note of the prompt.
static void begin_stream(Connection *c, Text prompt) {
  static Buffer event;
  event.len = 0;
  puts_to(&c->out, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n");
  open_event(c, &event);
  puts_to(&event, c->kind == CHAT ? "\"delta\":{\"role\":\"assistant\",\"content\":\"\"}," : "");
  puts_to(&event, "\"finish_reason\":null");
  if (c->tells_ids && c->kind == COMPLETION) put_prompt_ids(&event, prompt);
  puts_to(&event, "}]");
  if (c->note == ALL) put_note(&event, &prompt, 0);
  if (c->tells_ids && c->kind != COMPLETION) put_prompt_ids(&event, prompt);
  puts_to(&event, "}\n\n");
  put_chunk(c, &event);
  c->left = num_chunks;
  if (!interval_ns) {
    while (c->left) go_on(c);
    return;
  }
  c->due = now_ns() + interval_ns;
  c->next = NULL;
  *queue_end = c;
  queue_end = &c->next;
}

static void answer_whole(Connection *c, int prefill, Text prompt, int num_prompt) {
  static Buffer body;
  body.len = 0;
  int num_output = prefill ? 1 : num_chunks;
  puts_to(&body, "{\"id\":\"stub-1\",\"created\":1764400000,\"model\":\"stub\",\"choices\":[{\"index\":0,");
  put_said(c, &body, "message", num_output);
  put_ids(c, &body, num_output);
  if (c->tells_ids && c->kind == COMPLETION) put_prompt_ids(&body, prompt);
  putf(&body, ",\"logprobs\":null,\"finish_reason\":\"%s\"}],", prefill ? "length" : "stop");
  put_usage(&body, num_prompt, num_output);
  if (is_vllm ? c->tells_ids && c->kind != COMPLETION : prefill) put_prompt_ids(&body, prompt);
  if (c->note) put_note(&body, c->note == ALL ? &prompt : NULL, num_chunks);
  // Last, so that the smallest of proxies can cut it out without parsing.
  if (prefill || c->offers) {
    puts_to(&body, ",\"kv_transfer_params\":");
    put_params(&body, prefill, prefill ? num_prompt : c->num_tokens - 1);
  }
  puts_to(&body, "}");
  respond(c, &body);
}

// As if the client had gone on from the first half of what is known: that much is shared, and the rest is new.
static void tokenize(Connection *c, const char *body, size_t len) {
  static Buffer answer;
  answer.len = 0;
  const char *known_key = "\"known_token_ids\":[";
  const char *at = memmem(body, len, known_key, strlen(known_key));
  int count = (int)(at ? at - body : (long)len) / bytes_per_token + 1;
  if (count > MAX_PROMPT) count = MAX_PROMPT;
  Text known = text_of(body, len, known_key);
  int shared = count / 2;
  if ((size_t)shared * ID_TEXT >= known.len) shared = (int)(known.len / ID_TEXT);
  putf(&answer, "{\"count\":%d,\"max_model_len\":131072,\"tokens\":[", count);
  if (shared) put(&answer, known.at, (size_t)shared * ID_TEXT);
  const char *fresh = id_text + (size_t)count * ID_TEXT;
  if (known.len && !memcmp(known.at + (size_t)shared * ID_TEXT, fresh, ID_TEXT - 1)) fresh += ID_TEXT;
  put(&answer, fresh, (size_t)(count - shared) * ID_TEXT - 1);
  puts_to(&answer, "]}");
  respond(c, &answer);
}

static void serve(Connection *c, Text target, const char *body, size_t len) {
  Buffer fixed = {0};
  if (has(target.at, target.len, "GET /v1/models")) {
    fixed.data = is_vllm ? MODELS_OF("vllm") : MODELS_OF("backhaul");
  } else if (has(target.at, target.len, "/kv/release")) {
    fixed.data = "{\"released\":true}";
  }
  if (fixed.data) {
    fixed.len = strlen(fixed.data);
    respond(c, &fixed);
    return;
  }
  if (has(target.at, target.len, "/tokenize")) {
    tokenize(c, body, len);
    return;
  }
  num_requests++;
  int prefill = has(body, len, "\"do_remote_decode\":true");
  Text prompt = text_of(body, len, "\"prompt_token_ids\":[");
  int num_prompt = (int)((prompt.len + 1) / ID_TEXT);
  if (!num_prompt) {
    const char *key = "\"remote_num_tokens\":", *pulled = memmem(body, len, key, strlen(key));
    num_prompt = !prefill && pulled ? atoi(pulled + strlen(key)) : (int)len / bytes_per_token + 1;
    if (num_prompt > MAX_PROMPT) num_prompt = MAX_PROMPT;
    prompt = ids(num_prompt);
  }
  c->kind = has(target.at, target.len, "/chat/")      ? CHAT
            : has(target.at, target.len, "/generate") ? GENERATE
                                                                        : COMPLETION;
  c->tells_ids = is_vllm && has(body, len, "\"return_token_ids\":true");
  c->note = has(body, len, "\"token_note\":true")         ? ALL
            : has(body, len, "\"token_note\":\"output\"") ? OUTPUT
                                                          : NO_NOTE;
  c->usage = has(body, len, "\"include_usage\":true");
  c->offers = !prefill && !is_vllm && !has(body, len, "\"offer_blocks\":false") &&
              (has(body, len, "\"do_remote_prefill\":true") || has(body, len, "\"offer_blocks\":true"));
  c->num_tokens = num_prompt + num_chunks;
  if (!prefill && has(body, len, "\"stream\":true"))
    begin_stream(c, prompt);
  else
    answer_whole(c, prefill, prompt, num_prompt);
}

// Serves the requests that are complete, one after the other. False if one cannot be read.
static int serve_all(Connection *c) {
  size_t done = 0;
  while (!c->left) {
    const char *head = c->in.data + done;
    size_t size = head_length(head, c->in.len - done);
    if (!size) break;
    const char *given = header(head, size, "\r\nContent-Length:");
    size_t len = given ? strtoul(given, NULL, 10) : 0;
    if (c->in.len - done < size + len) break;
    const char *end = memchr(head, '\r', size);
    if (!end || header(head, size, "\r\nTransfer-Encoding:")) return 0;
    serve(c, (Text){head, (size_t)(end - head)}, head + size, len);
    done += size + len;
  }
  if (done) memmove(c->in.data, c->in.data + done, c->in.len -= done);
  return 1;
}

static void flush(Connection *c) {
  if (!send_some(c->fd, &c->out, &c->sent)) {
    c->dead = 1;
    return;
  }
  int blocked = c->sent < c->out.len;
  if (!blocked) c->out.len = c->sent = 0;
  if (blocked != c->blocked)
    watch(epoll, EPOLL_CTL_MOD, c->fd, blocked ? EPOLLIN | EPOLLOUT : EPOLLIN, c);
  c->blocked = blocked;
}

// A connection that is in the queue is freed when its turn comes there.
static void bury(Connection *c) {
  if (c->fd >= 0) close(c->fd);
  c->fd = -1;
  c->dead = 1;
  if (c->left) return;
  c->next = graveyard;
  graveyard = c;
}

static void serve_streams(void) {
  uint64_t now = now_ns();
  while (queue && queue->due <= now) {
    Connection *c = queue;
    queue = c->next;
    if (!queue) queue_end = &queue;
    if (c->dead) {
      c->left = 0;
      bury(c);
      continue;
    }
    go_on(c);
    if (c->left) {
      c->due += interval_ns;
      c->next = NULL;
      *queue_end = c;
      queue_end = &c->next;
    } else if (!serve_all(c)) {
      c->dead = 1;
    }
    flush(c);
    if (c->dead) bury(c);
  }
}

static void greet(int listener) {
  for (int fd; (fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0;) {
    no_delay(fd);
    Connection *c = calloc(1, sizeof *c);
    if (!c) die("memory");
    c->fd = fd;
    watch(epoll, EPOLL_CTL_ADD, fd, EPOLLIN, c);
  }
}

int main(int argc, char **argv) {
  signal(SIGPIPE, SIG_IGN);
  num_chunks = atoi(flag(argc, argv, "--chunks", "32"));
  interval_ns = 1000 * strtoull(flag(argc, argv, "--interval-us", "1000"), NULL, 10);
  bytes_per_token = atoi(flag(argc, argv, "--bytes-per-token", "4"));
  is_vllm = !strcmp(flag(argc, argv, "--kind", "backhaul"), "vllm");
  if (num_chunks < 1 || num_chunks > MOST_CHUNKS || bytes_per_token < 1) return fprintf(stderr, "bad flags\n"), 2;
  make_texts();
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  struct sockaddr_in address = loopback(atoi(flag(argc, argv, "--port", "0")));
  socklen_t size = sizeof address;
  int on = 1;  // its last life may have left connections behind
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, 1024)) die("listen");
  if (getsockname(listener, (struct sockaddr *)&address, &size)) die("getsockname");
  port = ntohs(address.sin_port);
  printf("%d\n", port);
  fflush(stdout);
  if ((epoll = epoll_create1(0)) < 0) die("epoll");
  watch(epoll, EPOLL_CTL_ADD, listener, EPOLLIN, NULL);
  for (struct epoll_event events[EVENTS];;) {
    int64_t wait = queue ? (int64_t)(queue->due - now_ns()) : -1;
    struct timespec timeout = {wait > 0 ? wait / 1000000000 : 0, wait > 0 ? wait % 1000000000 : 0};
    int count = epoll_pwait2(epoll, events, EVENTS, queue ? &timeout : NULL, NULL);
    for (int i = 0; i < count; i++) {
      Connection *c = events[i].data.ptr;
      if (!c) {
        greet(listener);
        continue;
      }
      if (events[i].events & ~(uint32_t)EPOLLOUT && !read_some(c->fd, &c->in)) c->dead = 1;
      if (!c->dead && !serve_all(c)) c->dead = 1;
      if (!c->dead && c->out.len) flush(c);
      if (c->dead) bury(c);
    }
    serve_streams();
    while (graveyard) {
      Connection *c = graveyard;
      graveyard = c->next;
      free(c->in.data);
      free(c->out.data);
      free(c);
    }
  }
}

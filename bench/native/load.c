// A load generator: one thread, epoll. Checks that every answer is complete, and prints one line of JSON.
//
//   load --port N --path PATH --body FILE --seconds S [--connections 64 | --rate R] [--number request|connection]
//        [--first 0] [--patience 10]
//
// With `connections`: each sends its next request when it has its answer. With `rate`: so many requests a second,
// whatever becomes of them, each timed from the moment when it was due. After `seconds` nothing more is asked, and
// what is under way may end within `patience` seconds; so with 0 seconds each connection has one answer. `########` in
// the body becomes eight digits: a number that no other request (or connection) of this run has, counted from `first`.
//
// An answer is good if its status is 200 and it is as long as it says; if it comes in chunks, it must end in [DONE].
// Events are counted as they come, and a gap is the time between two of one answer: 0 for those that come together.
#include "net.h"

#define MOST_CONNECTIONS 2048
#define MARK "########"
#define EVENT "data: {"
#define IN_CHUNKS SIZE_MAX

typedef struct {
  int fd, busy, blocked, good;
  Buffer out, in, body;      // `body`: the content of an answer's chunks, from its last event on
  size_t sent, head, due;    // `due`: how long the answer's body is to be
  uint64_t started, first;   // `first`: when the first byte of the answer's body was here
  uint64_t event;            // when the last event was here
  unsigned number;
} Connection;

typedef struct {
  double *values;
  size_t len, cap;
} Samples;

static int epoll, port, by_request, num_connections, num_busy;
static Connection connections[MOST_CONNECTIONS];
static Buffer request;       // head and body, the mark still in it
static char *mark;
static unsigned next_number;
static uint64_t num_good, num_bad, num_events, first_event, last_event;
static Samples latency, first_byte, gap;

static void add(Samples *s, uint64_t nanoseconds) {
  if (s->len == s->cap) {
    s->cap = s->cap ? 2 * s->cap : 4096;
    if (!(s->values = realloc(s->values, s->cap * sizeof *s->values))) die("memory");
  }
  s->values[s->len++] = (double)nanoseconds / 1e6;
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static double quantile(const Samples *s, double share) {
  return s->len ? s->values[(size_t)(share * (double)(s->len - 1) + 0.5)] : 0.0;
}

static void connect_to(Connection *c) {
  struct sockaddr_in address = loopback(port);
  if ((c->fd = socket(AF_INET, SOCK_STREAM, 0)) < 0) die("socket");
  if (connect(c->fd, (struct sockaddr *)&address, sizeof address)) die("connect");
  no_delay(c->fd);
  watch(epoll, EPOLL_CTL_ADD, c->fd, EPOLLIN, c);
  c->blocked = 0;
}

static Connection *open_connection(void) {
  Connection *c = &connections[num_connections++];
  c->number = next_number++;
  connect_to(c);
  return c;
}

static void flush(Connection *c) {
  send_some(c->fd, &c->out, &c->sent);  // what is broken will be seen when reading
  int blocked = c->sent < c->out.len;
  if (blocked != c->blocked) watch(epoll, EPOLL_CTL_MOD, c->fd, blocked ? EPOLLIN | EPOLLOUT : EPOLLIN, c);
  c->blocked = blocked;
}

static void ask(Connection *c, uint64_t due) {
  c->busy = 1;
  num_busy++;
  c->sent = c->head = c->out.len = c->in.len = c->body.len = 0;
  c->first = c->event = 0;
  c->started = due;
  put(&c->out, request.data, request.len);
  if (mark) {
    char digits[sizeof MARK + 4];
    snprintf(digits, sizeof digits, "%08u", (by_request ? next_number++ : c->number) % 100000000u);
    memcpy(c->out.data + (mark - request.data), digits, strlen(MARK));
  }
  flush(c);
}

static void count(Connection *c, int good, uint64_t now) {
  c->busy = 0;
  num_busy--;
  num_bad += !good;
  if (!good) return;
  num_good++;
  add(&latency, now - c->started);
  add(&first_byte, c->first - c->started);
}

static void forget(Buffer *b, size_t len) { memmove(b->data, b->data + len, b->len -= len); }

static void count_events(Connection *c, uint64_t now) {
  size_t from = 0;
  for (const char *at; (at = memmem(c->body.data + from, c->body.len - from, EVENT, strlen(EVENT)));) {
    from = (size_t)(at - c->body.data) + strlen(EVENT);
    num_events++;
    if (c->event) add(&gap, now - c->event);
    if (!first_event) first_event = now;
    c->event = last_event = now;
  }
  if (from) forget(&c->body, from);
}

// Takes the chunks that have come. True at the last one.
static int chunks_end(Connection *c, uint64_t now) {
  size_t at = 0, is_last = 0;
  while (!is_last) {
    const char *line = c->in.data + at, *end = memchr(line, '\n', c->in.len - at);
    if (!end) break;
    size_t head = (size_t)(end - line) + 1, size = strtoul(line, NULL, 16);
    if (c->in.len - at < head + size + 2) break;
    put(&c->body, line + head, size);
    at += head + size + 2;
    is_last = !size;
  }
  if (!at) return 0;
  forget(&c->in, at);
  count_events(c, now);
  return (int)is_last;
}

// Looks at what has come of an answer, and counts it once it is complete.
static void look(Connection *c, uint64_t now) {
  if (!c->head) {
    if (!(c->head = head_length(c->in.data, c->in.len))) return;
    c->good = !memcmp(c->in.data, "HTTP/1.1 200 ", 13);
    const char *length = header(c->in.data, c->head, "\r\nContent-Length:");
    c->due = length ? strtoul(length, NULL, 10) : IN_CHUNKS;
    forget(&c->in, c->head);
  }
  if (!c->first && c->in.len) c->first = now;
  if (c->due != IN_CHUNKS) {
    if (c->in.len >= c->due) count(c, c->good && c->in.len == c->due, now);
  } else if (chunks_end(c, now)) {
    const char *done = "data: [DONE]\n\n";
    size_t size = strlen(done);
    count(c, c->good && c->body.len >= size && !memcmp(c->body.data + c->body.len - size, done, size), now);
  }
}

static void read_from(Connection *c) {
  int open = read_some(c->fd, &c->in);
  uint64_t now = now_ns();
  if (c->busy) look(c, now);
  if (open) return;
  if (c->busy) count(c, 0, now);
  close(c->fd);
  connect_to(c);
}

static Connection *idle_connection(void) {
  for (int i = 0; i < num_connections; i++)
    if (!connections[i].busy) return &connections[i];
  return num_connections < MOST_CONNECTIONS ? open_connection() : NULL;
}

static void make_request(const char *path, const char *file) {
  Buffer body = {0};
  FILE *input = fopen(file, "rb");
  if (!input) die(file);
  for (size_t got; (got = fread(reserve(&body, ROOM), 1, ROOM, input)) > 0;) body.len += got;
  fclose(input);
  putf(&request, "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n", path, port);
  putf(&request, "Content-Length: %zu\r\n\r\n", body.len);
  put(&request, body.data, body.len);
  mark = memmem(request.data, request.len, MARK, strlen(MARK));
}

static void print_quantiles(const char *of, Samples *s) {
  qsort(s->values, s->len, sizeof(double), ascending);
  printf(", \"%sp50_ms\": %.3f, \"%sp99_ms\": %.3f", of, quantile(s, 0.5), of, quantile(s, 0.99));
}

static void print_result(double seconds) {
  printf("{\"seconds\": %.3f, \"good\": %llu, \"bad\": %llu, \"events\": %llu, \"event_seconds\": %.3f", seconds,
         (unsigned long long)num_good, (unsigned long long)num_bad, (unsigned long long)num_events,
         (double)(last_event - first_event) / 1e9);
  print_quantiles("", &latency);
  print_quantiles("first_", &first_byte);
  double sum = 0;
  for (size_t i = 0; i < gap.len; i++) sum += gap.values[i];
  print_quantiles("gap_", &gap);
  printf(", \"gap_mean_ms\": %.4f}\n", gap.len ? sum / (double)gap.len : 0.0);
}

int main(int argc, char **argv) {
  port = atoi(flag(argc, argv, "--port", "0"));
  by_request = !strcmp(flag(argc, argv, "--number", "request"), "request");
  next_number = (unsigned)atoi(flag(argc, argv, "--first", "0"));
  double seconds = atof(flag(argc, argv, "--seconds", "1"));
  double rate = atof(flag(argc, argv, "--rate", "0")), patience = atof(flag(argc, argv, "--patience", "10"));
  int wanted = rate > 0 ? 0 : atoi(flag(argc, argv, "--connections", "64"));
  const char *file = flag(argc, argv, "--body", NULL);
  if (!port || !file || wanted > MOST_CONNECTIONS) return fprintf(stderr, "bad flags\n"), 2;
  make_request(flag(argc, argv, "--path", "/v1/chat/completions"), file);
  if ((epoll = epoll_create1(0)) < 0) die("epoll");

  uint64_t start = now_ns(), due = start, period = rate > 0 ? (uint64_t)(1e9 / rate) : 0;
  uint64_t last = start + (uint64_t)(seconds * 1e9), end = last + (uint64_t)(patience * 1e9);
  for (int i = 0; i < wanted; i++) ask(open_connection(), now_ns());
  for (struct epoll_event events[EVENTS];;) {
    uint64_t now = now_ns();
    if (now >= end || (now >= last && !num_busy)) break;
    for (; period && due <= now && due < last; due += period) {
      Connection *c = idle_connection();
      if (c)
        ask(c, due);
      else
        num_bad++;
    }
    uint64_t wait = (now >= last ? end : period && due < last ? due : last) - now;
    struct timespec timeout = {(time_t)(wait / 1000000000), (long)(wait % 1000000000)};
    int ready = epoll_pwait2(epoll, events, EVENTS, &timeout, NULL);
    for (int i = 0; i < ready; i++) {
      Connection *c = events[i].data.ptr;
      if (events[i].events & EPOLLOUT) flush(c);
      if (events[i].events & ~(uint32_t)EPOLLOUT) read_from(c);
      if (!period && !c->busy && now_ns() < last) ask(c, now_ns());
    }
  }
  num_bad += (uint64_t)num_busy;
  print_result((double)(now_ns() - start) / 1e9);
  return 0;
}

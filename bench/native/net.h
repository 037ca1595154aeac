// What stub engine and load generator share: the clock, growing buffers, flags, heads of HTTP/1.1 messages.
#ifndef NET_H
#define NET_H
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define EVENTS 256  // taken from epoll at a time
#define ROOM 65536  // bytes read at a time

typedef struct {
  char *data;
  size_t len, cap;
} Buffer;

__attribute__((noreturn)) static inline void die(const char *what) {
  perror(what);
  exit(1);
}

static inline uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

// Makes room for `more` bytes, and returns where they go.
static inline char *reserve(Buffer *b, size_t more) {
  if (b->cap - b->len < more) {
    b->cap = 2 * (b->len + more);
    if (!(b->data = realloc(b->data, b->cap))) die("memory");
  }
  return b->data + b->len;
}

static inline void put(Buffer *b, const char *data, size_t len) {
  memcpy(reserve(b, len), data, len);
  b->len += len;
}

static inline void puts_to(Buffer *b, const char *text) { put(b, text, strlen(text)); }

// Short pieces only: at most 4,000 bytes.
__attribute__((format(printf, 2, 3))) static inline void putf(Buffer *b, const char *format, ...) {
  va_list args;
  va_start(args, format);
  b->len += (size_t)vsnprintf(reserve(b, 4096), 4096, format, args);
  va_end(args);
}

// Reads what there is. False if the other side has closed the connection, or broken it off.
static inline int read_some(int fd, Buffer *b) {
  for (;;) {
    ssize_t got = recv(fd, reserve(b, ROOM), ROOM, MSG_DONTWAIT);
    if (got > 0) b->len += (size_t)got;
    if (got == 0) return 0;
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    if (got < ROOM) return 1;
  }
}

// Sends what fits, from `*sent` on. False if the connection is broken.
static inline int send_some(int fd, const Buffer *b, size_t *sent) {
  while (*sent < b->len) {
    ssize_t put = send(fd, b->data + *sent, b->len - *sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put < 0) return errno == EAGAIN || errno == EINTR;
    *sent += (size_t)put;
  }
  return 1;
}

// The length of the head at the start of a message, its blank line included; 0 if it is not complete.
static inline size_t head_length(const char *data, size_t len) {
  const char *end = memmem(data, len, "\r\n\r\n", 4);
  return end ? (size_t)(end - data) + 4 : 0;
}

// The value of a header, given as "\r\nName:" and found whatever its case; NULL if it is not there.
static inline const char *header(const char *head, size_t len, const char *name) {
  size_t size = strlen(name);
  for (const char *at = head; (at = memchr(at, '\r', len - (size_t)(at - head))); at++) {
    if ((size_t)(head + len - at) < size) return NULL;
    if (!strncasecmp(at, name, size)) return at + size + strspn(at + size, " ");
  }
  return NULL;
}

static inline struct sockaddr_in loopback(int port) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

static inline void no_delay(int fd) { setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int)); }

static inline void watch(int epoll, int operation, int fd, uint32_t events, void *who) {
  struct epoll_event event = {.events = events, .data.ptr = who};
  if (epoll_ctl(epoll, operation, fd, &event)) die("epoll_ctl");
}

// The value after a flag such as "--rate", or `otherwise`.
static inline const char *flag(int argc, char **argv, const char *name, const char *otherwise) {
  for (int i = 1; i + 1 < argc; i += 2)
    if (!strcmp(argv[i], name)) return argv[i + 1];
  return otherwise;
}

#endif

/* A vLLM server without a model, on one thread: P, D or replica, by what it is asked.
 *
 *     mock [PORTS]        listens on so many ports of 127.0.0.1 (default 1), and prints them on one line
 *
 * An answer has max_tokens words, each a chunk of its own where the request streams. When they come is said in the
 * first message, since routers may drop fields that they don't know: "conversation-000000000017 first=0us
 * every=10000us". An answer's id holds the conversation's number. A prefill leg (NIXL) is answered with
 * kv_transfer_params; a decode leg with them is counted. GET /stats says what was asked, GET /hang_up ends all streams.
 * Ends at the end of its stdin.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "buffer.h"
#include "clock.h"
#include "json_fields.h"
#include "marks.h"
#include "request.h"
#include "timers.h"

#define MAX_PORTS 8
#define MAX_TOKENS 100000
#define READ_SIZE (256 * 1024)
#define DATE "date: Fri, 20 Nov 2026 17:45:18 GMT\r\nserver: uvicorn\r\n"

struct stream {
    char number[DIGITS + 1];
    long sent, tokens;
    uint64_t due_ns, every_ns;
};

struct connection {
    int fd; /* below 0: closed, and freed once no timer holds it */
    bool is_listener, is_streaming, has_timer, waits_to_write;
    struct buffer in, out;
    struct request request; /* that is being read */
    struct stream stream;
};

static struct {
    long requests, answers, streams, chunks, prefills, handovers, aborted, unknown, open;
} stats;

static int epoll;
static struct timers timers;

/* ---- sending ---- */

static void watch(struct connection *connection, bool writing) {
    if (connection->waits_to_write == writing) return;
    connection->waits_to_write = writing;
    struct epoll_event event = {EPOLLIN | EPOLLRDHUP | (writing ? EPOLLOUT : 0), {.ptr = connection}};
    epoll_ctl(epoll, EPOLL_CTL_MOD, connection->fd, &event);
}

static void hang_up(struct connection *connection) {
    if (connection->fd < 0) return;
    close(connection->fd);
    connection->fd = -1;
    if (connection->is_streaming) stats.aborted++, stats.open--;
    connection->is_streaming = false;
    buffer_free(&connection->in);
    buffer_free(&connection->out);
}

/* Sends what lies in `out`; what the socket does not take now goes when it can. */
static void flush(struct connection *connection) {
    struct buffer *out = &connection->out;
    ssize_t sent = out->length ? send(connection->fd, out->bytes, out->length, MSG_NOSIGNAL) : 0;
    if (sent < 0 && errno != EAGAIN) {
        hang_up(connection);
        return;
    }
    if (sent > 0) buffer_take(out, (size_t)sent);
    watch(connection, out->length > 0);
}

__attribute__((format(printf, 2, 3))) static void print(struct buffer *out, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    char *space = buffer_space(out, 2048);
    out->length += (size_t)vsnprintf(space, 2048, format, arguments);
    va_end(arguments);
}

static void answer(struct connection *connection, const char *status, const char *type, const struct buffer *body) {
    print(&connection->out, "HTTP/1.1 %s\r\n" DATE "content-length: %zu\r\ncontent-type: %s\r\n\r\n", status,
          body->length, type);
    buffer_add(&connection->out, body->bytes, body->length);
    flush(connection);
}

/* ---- chat ---- */

static void completion(struct buffer *body, const char *number, long tokens) {
    print(body,
          "{\"id\":\"" ANSWER_ID "%s\",\"object\":\"chat.completion\",\"created\":1763660718,\"model\":\"mock\","
          "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"",
          number);
    for (long word = 0; word < tokens; word++) buffer_add(body, WORD, strlen(WORD));
    print(body,
          "\",\"refusal\":null,\"tool_calls\":[]},\"logprobs\":null,\"finish_reason\":\"length\"}],"
          "\"usage\":{\"prompt_tokens\":160,\"completion_tokens\":%ld,\"total_tokens\":%ld,"
          "\"prompt_tokens_details\":{\"cached_tokens\":144}}",
          tokens, 160 + tokens);
}

static void prefill(struct buffer *body, const char *number) {
    stats.prefills++;
    completion(body, number, 1);
    print(body,
          ",\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,"
          "\"remote_block_ids\":[[0,1,2,3,4,5,6,7,8,9]],\"remote_num_tokens\":160,"
          "\"remote_engine_id\":\"5f9b3a6e-7d1c-4a2b-8f3e-1c2d3e4f5a6b\","
          "\"remote_request_id\":\"" ANSWER_ID "%s\",\"remote_host\":\"127.0.0.1\",\"remote_port\":5600,"
          "\"tp_size\":1}}",
          number);
}

static void add_chunk(struct connection *connection) {
    struct stream *stream = &connection->stream;
    bool is_last = stream->sent + 1 == stream->tokens;
    char data[512];
    int length = snprintf(data, sizeof data,
                          "data: {\"id\":\"" ANSWER_ID "%s\",\"object\":\"chat.completion.chunk\","
                          "\"created\":1763660718,\"model\":\"mock\",\"choices\":[{\"index\":0,\"delta\":{%s"
                          "\"content\":\"" WORD "\"},\"logprobs\":null,\"finish_reason\":%s}]}\n\n",
                          stream->number, stream->sent == 0 ? "\"role\":\"assistant\"," : "",
                          is_last ? "\"length\"" : "null");
    print(&connection->out, "%x\r\n%s\r\n", length, data);
    stream->sent++, stats.chunks++;
    if (!is_last) return;
    print(&connection->out, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
    connection->is_streaming = false, stats.open--;
}

static void begin_stream(struct connection *connection, const char *number, long tokens, long first_us, long every_us) {
    stats.streams++, stats.open++;
    connection->is_streaming = true;
    connection->stream = (struct stream){.tokens = tokens, .due_ns = now_ns() + (uint64_t)first_us * US,
                                         .every_ns = (uint64_t)every_us * US};
    memcpy(connection->stream.number, number, DIGITS);
    print(&connection->out, "HTTP/1.1 200 OK\r\n" DATE "content-type: text/event-stream; charset=utf-8\r\n"
                            "transfer-encoding: chunked\r\n\r\n");
    flush(connection);
    connection->has_timer = true; /* even if it was closed just now: the timer then frees it */
    timers_add(&timers, connection->stream.due_ns, connection);
}

static long microseconds(struct text text, const char *name) {
    const char *found = memmem(text.start, (size_t)(text.end - text.start), name, strlen(name));
    return found ? strtol(found + strlen(name), NULL, 10) : 0;
}

static void chat(struct connection *connection, struct text body) {
    char number[DIGITS + 1] = "000000000000";
    const char *mark = memmem(body.start, (size_t)(body.end - body.start), CONVERSATION, strlen(CONVERSATION));
    struct text orders = {0};
    if (mark != NULL && body.end - mark > 128) {
        memcpy(number, mark + strlen(CONVERSATION), DIGITS);
        orders = (struct text){mark, mark + 128};
    }
    long tokens = json_number(body, "max_tokens", json_number(body, "max_completion_tokens", 16));
    tokens = tokens < 1 ? 1 : tokens > MAX_TOKENS ? MAX_TOKENS : tokens;
    struct text transfer = json_field(body, "kv_transfer_params");
    if (json_is_true(transfer, "do_remote_prefill")) stats.handovers++;
    if (json_is_true(body, "stream")) {
        begin_stream(connection, number, tokens, orders.start ? microseconds(orders, "first=") : 0,
                     orders.start ? microseconds(orders, "every=") : 0);
        return;
    }
    struct buffer whole = {0};
    if (json_is_true(transfer, "do_remote_decode")) {
        prefill(&whole, number);
    } else {
        stats.answers++;
        completion(&whole, number, tokens);
        buffer_add(&whole, "}", 1);
    }
    answer(connection, "200 OK", "application/json", &whole);
    buffer_free(&whole);
}

/* ---- what routers ask before and beside it ---- */

static bool asks(struct text path, const char *name) {
    return (size_t)(path.end - path.start) == strlen(name) && memcmp(path.start, name, strlen(name)) == 0;
}

static void look(struct connection *connection, struct text path) {
    struct buffer body = {0};
    const char *status = "200 OK", *type = "application/json";
    if (asks(path, "/health") || asks(path, "/ping")) {
        buffer_space(&body, 1);
    } else if (asks(path, "/v1/models")) {
        print(&body, "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1763660718,"
                     "\"owned_by\":\"vllm\",\"root\":\"mock\",\"parent\":null,\"max_model_len\":1048576}]}");
    } else if (asks(path, "/version")) {
        print(&body, "{\"version\":\"0.24.0\"}");
    } else if (asks(path, "/get_server_info") || asks(path, "/server_info") || asks(path, "/get_model_info") ||
               asks(path, "/model_info")) {
        print(&body, "{\"model_path\":\"mock\",\"served_model_name\":\"mock\",\"model_id\":\"mock\","
                     "\"tokenizer_path\":\"\",\"is_generation\":true,\"dp_size\":1,\"tp_size\":1,"
                     "\"version\":\"0.24.0\"}");
    } else if (asks(path, "/metrics")) {
        type = "text/plain; version=0.0.4; charset=utf-8";
        print(&body, "vllm:num_requests_running{engine=\"0\",model_name=\"mock\"} %ld\n"
                     "vllm:num_requests_waiting{engine=\"0\",model_name=\"mock\"} 0\n"
                     "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"mock\"} 0.1\n",
              stats.open);
    } else if (asks(path, "/hang_up")) {
        for (size_t at = 0; at < timers.length; at++) hang_up(timers.heap[at].owner);
        print(&body, "{}");
    } else if (asks(path, "/stats")) {
        print(&body, "{\"requests\":%ld,\"answers\":%ld,\"streams\":%ld,\"chunks\":%ld,\"prefills\":%ld,"
                     "\"handovers\":%ld,\"aborted\":%ld,\"unknown\":%ld,\"open\":%ld}",
              stats.requests, stats.answers, stats.streams, stats.chunks, stats.prefills, stats.handovers,
              stats.aborted, stats.unknown, stats.open);
    } else {
        stats.unknown++;
        status = "404 Not Found";
        print(&body, "{\"detail\":\"Not Found\"}");
    }
    answer(connection, status, type, &body);
    buffer_free(&body);
}

/* ---- requests ---- */

static void serve(struct connection *connection, struct text body) {
    stats.requests++;
    const char *head = connection->in.bytes, *target = strchr(head, ' ');
    if (target == NULL) {
        hang_up(connection);
        return;
    }
    struct text path = {target + 1, target + 1 + strcspn(target + 1, " ?\r")};
    if (memcmp(head, "POST ", 5) == 0 && asks(path, "/v1/chat/completions"))
        chat(connection, body);
    else
        look(connection, path);
}

/* Serves every request that lies complete in `in`, one answer after the other. */
static void serve_all(struct connection *connection) {
    struct buffer *in = &connection->in;
    struct request *request = &connection->request;
    while (connection->fd >= 0 && in->length && !connection->is_streaming && request_read_head(request, in)) {
        if (request->wants_continue) {
            request->wants_continue = false;
            print(&connection->out, "HTTP/1.1 100 Continue\r\n\r\n");
            flush(connection);
        }
        struct text body;
        size_t whole = connection->fd >= 0 ? request_read_body(request, in, &body) : 0;
        if (whole == 0) return;
        serve(connection, body);
        *request = (struct request){0};
        if (connection->fd >= 0) buffer_take(in, whole);
    }
}

static void read_more(struct connection *connection) {
    for (;;) {
        char *space = buffer_space(&connection->in, READ_SIZE);
        ssize_t got = recv(connection->fd, space, READ_SIZE, 0);
        if (got == 0 || (got < 0 && errno != EAGAIN)) {
            hang_up(connection);
            return;
        }
        if (got < 0) break;
        connection->in.length += (size_t)got;
        if (got < READ_SIZE) break;
    }
    serve_all(connection);
    if (connection->fd >= 0 && connection->in.length == 0) buffer_free(&connection->in); /* thousands are idle */
}

/* ---- the loop ---- */

static void accept_all(int listener) {
    int fd, on = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct connection *connection = calloc(1, sizeof *connection);
        connection->fd = fd;
        struct epoll_event event = {EPOLLIN | EPOLLRDHUP, {.ptr = connection}};
        epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
    }
}

static void send_due_chunks(uint64_t until_ns) {
    while (timers.length && timers.heap[0].due_ns <= until_ns) {
        struct connection *connection = timers_take(&timers);
        struct stream *stream = &connection->stream;
        connection->has_timer = false;
        if (connection->fd >= 0) {
            do add_chunk(connection);
            while (connection->is_streaming && stream->every_ns == 0);
            flush(connection);
        }
        if (connection->is_streaming) {
            stream->due_ns += stream->every_ns;
            connection->has_timer = true;
            timers_add(&timers, stream->due_ns, connection);
        } else if (connection->fd >= 0) {
            serve_all(connection); /* what came meanwhile */
        }
        if (connection->fd < 0 && !connection->has_timer) free(connection);
    }
}

static struct connection *listen_on_free_port(void) {
    struct connection *listener = calloc(1, sizeof *listener);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    listener->is_listener = true;
    listener->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (bind(listener->fd, (struct sockaddr *)&address, sizeof address) || listen(listener->fd, 8192) ||
        getsockname(listener->fd, (struct sockaddr *)&address, &size)) {
        perror("mock: listen");
        exit(1);
    }
    printf("%d ", ntohs(address.sin_port));
    struct epoll_event event = {EPOLLIN, {.ptr = listener}};
    epoll_ctl(epoll, EPOLL_CTL_ADD, listener->fd, &event);
    return listener;
}

static bool stdin_has_ended(void) {
    char byte;
    return read(STDIN_FILENO, &byte, 1) == 0;
}

static void react(struct epoll_event event) {
    struct connection *connection = event.data.ptr;
    if (connection->is_listener) {
        accept_all(connection->fd);
        return;
    }
    if (event.events & EPOLLOUT) flush(connection);
    if (connection->fd >= 0 && (event.events & ~(uint32_t)EPOLLOUT)) read_more(connection);
    if (connection->fd < 0 && !connection->has_timer) free(connection);
}

int main(int count, char **arguments) {
    static struct epoll_event events[1024];
    int ports = count > 1 ? atoi(arguments[1]) : 1;
    signal(SIGPIPE, SIG_IGN);
    be_punctual();
    epoll = epoll_create1(0);
    for (int port = 0; port < ports && port < MAX_PORTS; port++) listen_on_free_port();
    puts("");
    fflush(stdout);
    struct epoll_event event = {EPOLLIN | EPOLLRDHUP, {.ptr = NULL}};
    fcntl(STDIN_FILENO, F_SETFL, O_NONBLOCK);
    epoll_ctl(epoll, EPOLL_CTL_ADD, STDIN_FILENO, &event);
    for (;;) {
        struct timespec pause = {0}, *limit = NULL;
        if (timers.length) {
            uint64_t now = now_ns(), due = timers.heap[0].due_ns, wait = due > now ? due - now : 0;
            pause = (struct timespec){(time_t)(wait / SECOND), (long)(wait % SECOND)};
            limit = &pause;
        }
        int ready = epoll_pwait2(epoll, events, 1024, limit, NULL);
        for (int at = 0; at < ready; at++) {
            if (events[at].data.ptr != NULL) react(events[at]);
            else if (stdin_has_ended()) return 0;
        }
        send_due_chunks(now_ns());
    }
}

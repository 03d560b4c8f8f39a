/* Clients of a chat endpoint, on one thread, that check what they get.
 *
 *     load closed PORT BODIES CONNECTIONS SECONDS    each asks again as soon as it is answered
 *     load open   PORT BODIES CONNECTIONS SECONDS --rate R    R requests/s, whatever the answers do
 *     load once   PORT BODIES CONNECTIONS SECONDS    one request on each new connection, all at once; SECONDS at most
 *     load hold   PORT BODIES CONNECTIONS SECONDS    streams that stay open until the end of stdin, or SECONDS
 *
 * BODIES: the turns of a conversation. Each connection has one of its own: the number --first plus its place. Its turns
 * come in order, and then again from the first of them; with --fresh every request begins a new conversation. --words:
 * the length of a right answer. --ramp MS: connections open, and with `closed` the requests begin, evenly over so long.
 *
 * --requests N: with `closed`, that many and no more.
 *
 * Prints a line "begin" when what is measured begins (hold: when all streams are open), a line "end" when it ends, and
 * then one JSON object.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "answer.h"
#include "bodies.h"
#include "clock.h"
#include "samples.h"

#define HEAD_SIZE 2048 /* a request's head, and its body up to the conversation's number */
#define READ_SIZE (256 * 1024)
#define DRAIN_NS (500 * MS) /* after the end, for answers under way: to be checked, not counted */

enum mode { CLOSED, OPEN, ONCE, HOLD };
enum state { UNUSED, CONNECTING, IDLE, SENDING, WAITING };

struct connection {
    int fd;
    enum state state;
    bool has_begun_answer; /* its first byte, or chunk, was seen */
    size_t turns, head_length, sent;
    uint64_t begun_ns;
    struct body turn;
    struct answer answer;
    char head[HEAD_SIZE], number[DIGITS + 1];
};

static struct {
    enum mode mode;
    int port;
    size_t connections;
    double seconds, rate;
    long first, words, requests;
    bool fresh;
    uint64_t ramp_ns;
} plan = {.words = 16, .requests = LONG_MAX};

static struct {
    long asked, right, refused, broken, refusals, wrong, chunks;
    struct statuses statuses; /* of the refusals */
    struct samples whole, first;
} found;

static struct bodies bodies;
static struct connection *connections;
static size_t opened, busy, holding; /* busy: requests under way */
static bool is_measuring, is_over;
static uint64_t begin_ns, end_ns;
static long conversations, arrivals_served;
static int epoll;

/* ---- one request ---- */

static void wait_for(struct connection *connection, uint32_t events, int how) {
    struct epoll_event event = {events, {.ptr = connection}};
    epoll_ctl(epoll, how, connection->fd, &event);
}

static void compose(struct connection *connection) {
    size_t place = (size_t)(connection - connections);
    long number = plan.first + (plan.fresh ? conversations++ : (long)place);
    snprintf(connection->number, sizeof connection->number, "%0*ld", DIGITS, number);
    connection->turn = bodies.turns[plan.fresh ? 0 : connection->turns++ % bodies.count];
    const struct body *turn = &connection->turn;
    int length = snprintf(connection->head, HEAD_SIZE,
                          "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\nuser-agent: load/1\r\n"
                          "accept: */*\r\nauthorization: Bearer sk-mock\r\ncontent-type: application/json\r\n"
                          "content-length: %zu\r\n\r\n",
                          plan.port, turn->length);
    size_t before = turn->number_at;
    if ((size_t)length + before + DIGITS > HEAD_SIZE) bodies_fail("a body", "its conversation's mark is too far in");
    memcpy(connection->head + length, turn->bytes, before);
    memcpy(connection->head + (size_t)length + before, connection->number, DIGITS);
    connection->head_length = (size_t)length + before + DIGITS;
}

static void drop(struct connection *connection);

/* Sends what is left of the request. */
static void push(struct connection *connection) {
    size_t tail_at = connection->turn.number_at + DIGITS, tail = connection->turn.length - tail_at;
    size_t whole = connection->head_length + tail;
    while (connection->sent < whole) {
        size_t in_tail = connection->sent > connection->head_length ? connection->sent - connection->head_length : 0;
        size_t in_head = connection->sent - in_tail;
        struct iovec parts[2] = {{connection->head + in_head, connection->head_length - in_head},
                                 {(char *)connection->turn.bytes + tail_at + in_tail, tail - in_tail}};
        ssize_t sent = writev(connection->fd, parts, 2);
        if (sent < 0 && errno == EAGAIN) {
            if (connection->state != SENDING) wait_for(connection, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
            connection->state = SENDING;
            return;
        }
        if (sent < 0) {
            drop(connection);
            return;
        }
        connection->sent += (size_t)sent;
    }
    if (connection->state == SENDING) wait_for(connection, EPOLLIN, EPOLL_CTL_MOD);
    connection->state = WAITING;
}

/* `due_ns`: when the client wanted to ask. */
static void ask(struct connection *connection, uint64_t due_ns) {
    compose(connection);
    answer_begin(&connection->answer, connection->number);
    connection->has_begun_answer = false;
    connection->sent = 0;
    connection->begun_ns = due_ns;
    connection->state = WAITING;
    found.asked++, busy++;
    push(connection);
}

/* ---- connections ---- */

static bool may_ask(void) { return !is_over && found.asked < plan.requests; }

static void connect_it(struct connection *connection) {
    int on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)plan.port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    connection->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (connection->fd < 0) {
        perror("load: socket");
        exit(1);
    }
    setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    connect(connection->fd, (struct sockaddr *)&address, sizeof address); /* what came of it is seen below */
    connection->state = CONNECTING;
    wait_for(connection, EPOLLIN | EPOLLOUT, EPOLL_CTL_ADD);
}

static void reconnect(struct connection *connection) {
    close(connection->fd);
    connection->state = UNUSED;
    if (!is_over && plan.mode != ONCE && plan.mode != HOLD) connect_it(connection);
}

/* The connection ended before its answer was whole. */
static void drop(struct connection *connection) {
    found.broken++, busy--;
    reconnect(connection);
}

static void connected(struct connection *connection) {
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(connection->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error) {
        found.refused++;
        usleep(1000); /* a proxy that is down is not asked as fast as possible */
        reconnect(connection);
        return;
    }
    wait_for(connection, EPOLLIN, EPOLL_CTL_MOD);
    connection->state = IDLE;
    if (plan.mode != OPEN && may_ask()) ask(connection, plan.mode == ONCE ? begin_ns : now_ns());
}

static void finish(struct connection *connection, uint64_t now) {
    const struct answer *answer = &connection->answer;
    connection->state = IDLE;
    busy--;
    if (answer->status != 200) found.refusals++, statuses_add(&found.statuses, answer->status);
    else if (!answer_is_right(answer, plan.words)) found.wrong++;
    else if (is_measuring && connection->begun_ns >= begin_ns) {
        found.right++;
        samples_add(&found.whole, now - connection->begun_ns);
    } else if (is_measuring) {
        found.right++; /* it began before: work done, but no latency */
    }
    if (answer->closes || plan.mode == ONCE || plan.mode == HOLD) reconnect(connection);
    else if (plan.mode == CLOSED && may_ask()) ask(connection, now_ns());
}

/* ---- answers ---- */

static void first_seen(struct connection *connection, uint64_t now) {
    connection->has_begun_answer = true;
    if (plan.mode == HOLD) holding++;
    if (is_measuring && connection->begun_ns >= begin_ns) samples_add(&found.first, now - connection->begun_ns);
}

static void take(struct connection *connection, const char *bytes, size_t length) {
    uint64_t now = now_ns();
    while (length && connection->state == WAITING) {
        struct answer *answer = &connection->answer;
        long before = answer->chunks;
        size_t used = answer_read(answer, bytes, length);
        bytes += used, length -= used;
        if (is_measuring) found.chunks += answer->chunks - before;
        if (!connection->has_begun_answer && answer->chunks) first_seen(connection, now);
        if (answer->part == WHOLE) finish(connection, now);
    }
}

static void read_more(struct connection *connection) {
    static char bytes[READ_SIZE];
    ssize_t got = recv(connection->fd, bytes, sizeof bytes, 0);
    if (got > 0) {
        if (connection->state == SENDING && connection->answer.part == HEAD) { /* answered before it was asked */
            wait_for(connection, EPOLLIN, EPOLL_CTL_MOD);
            connection->state = WAITING;
            connection->answer.closes = true;
        }
        take(connection, bytes, (size_t)got);
    } else if (got == 0 && connection->state == WAITING && connection->answer.part == BODY_TO_END) {
        answer_end(&connection->answer);
        connection->answer.closes = true;
        finish(connection, now_ns());
    } else if (got == 0 || errno != EAGAIN) {
        if (connection->state == IDLE) reconnect(connection);
        else drop(connection);
    }
}

/* ---- the plan ---- */

/* After the beginning. */
static uint64_t arrival_ns(long number) { return (uint64_t)((double)number / plan.rate * 1e9); }

/* With a rate: what is due by now. What finds no connection free is asked later, and its wait counts; that this program
 * itself was woken late does not. */
static void serve_arrivals(uint64_t now) {
    static size_t next;
    static bool is_late;
    long due = (long)((double)(now - begin_ns) / 1e9 * plan.rate) + 1;
    for (size_t looked = 0; arrivals_served < due && looked < plan.connections; looked++) {
        struct connection *connection = &connections[next++ % plan.connections];
        if (connection->state != IDLE) continue;
        uint64_t wanted_ns = begin_ns + arrival_ns(arrivals_served++);
        ask(connection, is_late ? wanted_ns : now_ns());
    }
    is_late = arrivals_served < due;
}

static void open_connections(uint64_t start_ns, uint64_t now) {
    while (opened < plan.connections && now >= start_ns + plan.ramp_ns * opened / plan.connections)
        connect_it(&connections[opened++]);
}

static void begin(uint64_t now) {
    is_measuring = true;
    begin_ns = now;
    end_ns = now + (uint64_t)(plan.seconds * 1e9);
    puts("begin");
    fflush(stdout);
}

static bool is_ready(uint64_t start_ns, uint64_t now) {
    if (plan.mode == ONCE) return true; /* the connecting is a part of it */
    if (plan.mode == HOLD) return holding == plan.connections || now > start_ns + plan.ramp_ns + 60 * SECOND;
    return opened == plan.connections && now >= start_ns + plan.ramp_ns;
}

static bool stdin_has_ended(void) {
    char byte;
    return read(STDIN_FILENO, &byte, 1) == 0;
}

/* Connections that wait to be accepted, or for an answer. */
static size_t waiting(void) {
    size_t count = 0;
    for (size_t at = 0; at < plan.connections; at++)
        if (connections[at].state != UNUSED && connections[at].state != IDLE) count++;
    return count;
}

static bool has_done_all(void) {
    if (plan.mode == ONCE) return waiting() == 0;
    return plan.mode == HOLD ? stdin_has_ended() : busy == 0 && found.asked >= plan.requests;
}

/* How long nothing is to be done but to react. */
static struct timespec pause_until_next(uint64_t start_ns, uint64_t now) {
    uint64_t next = now + 20 * MS;
    if (opened < plan.connections) next = start_ns + plan.ramp_ns * opened / plan.connections;
    else if (!is_measuring && !is_over && plan.mode != HOLD) next = start_ns + plan.ramp_ns;
    else if (plan.mode == OPEN && is_measuring) next = begin_ns + arrival_ns(arrivals_served);
    uint64_t wait = next > now ? next - now : 0;
    if (wait == 0 && plan.mode == OPEN && is_measuring) wait = 100 * US; /* every connection is taken */
    return (struct timespec){0, (long)(wait < 20 * MS ? wait : 20 * MS)};
}

static void react(struct epoll_event event) {
    struct connection *connection = event.data.ptr;
    if (connection->state == CONNECTING) connected(connection);
    else if (connection->state == SENDING && (event.events & EPOLLOUT)) push(connection);
    else if (connection->state != UNUSED && (event.events & (EPOLLIN | EPOLLHUP | EPOLLERR))) read_more(connection);
}

/* Until the end, and then for a moment for the answers that are under way. */
static void run(void) {
    static struct epoll_event events[1024];
    uint64_t start_ns = now_ns(), now = start_ns;
    for (;;) {
        if (!is_measuring && !is_over && is_ready(start_ns, now)) begin(now);
        if (!is_over) open_connections(start_ns, now);
        if (plan.mode == OPEN && is_measuring && !is_over) serve_arrivals(now);
        struct timespec pause = pause_until_next(start_ns, now);
        int ready = epoll_pwait2(epoll, events, 1024, &pause, NULL);
        for (int at = 0; at < ready; at++) react(events[at]);
        now = now_ns();
        if (is_measuring && (now >= end_ns || has_done_all())) {
            is_over = true;
            is_measuring = false;
            end_ns = now;
            puts("end");
            fflush(stdout);
        }
        if (is_over && (busy == 0 || plan.mode == HOLD || now >= end_ns + DRAIN_NS)) return;
    }
}

static void print_found(void) {
    double seconds = (double)(end_ns - begin_ns) / 1e9;
    printf("{\"seconds\":%.4f,\"asked\":%ld,\"right\":%ld,\"refused\":%ld,\"broken\":%ld,\"refusals\":%ld,"
           "\"wrong\":%ld,\"unanswered\":%zu,\"holding\":%zu,\"chunks\":%ld,",
           seconds, found.asked, found.right, found.refused, found.broken, found.refusals, found.wrong,
           plan.mode == HOLD ? plan.connections - holding : waiting(), holding, found.chunks);
    statuses_print(&found.statuses);
    samples_print(&found.whole, "whole");
    samples_print(&found.first, "first");
    printf("\"late\":%ld}\n", plan.mode == OPEN ? (long)(seconds * plan.rate) - arrivals_served : 0);
}

static void usage(void) {
    fputs("usage: load closed|open|once|hold PORT BODIES CONNECTIONS SECONDS [--rate R] [--first N] [--words N] "
          "[--ramp MS] [--requests N] [--fresh]\n",
          stderr);
    exit(2);
}

static enum mode mode_named(const char *name) {
    const char *names[] = {"closed", "open", "once", "hold"};
    for (int mode = CLOSED; mode <= HOLD; mode++)
        if (strcmp(name, names[mode]) == 0) return (enum mode)mode;
    usage();
    return CLOSED;
}

int main(int count, char **arguments) {
    static const struct option options[] = {{"rate", 1, NULL, 'r'}, {"first", 1, NULL, 'n'}, {"words", 1, NULL, 'w'},
                                            {"ramp", 1, NULL, 'm'}, {"fresh", 0, NULL, 'f'}, {"requests", 1, NULL, 'q'},
                                            {NULL, 0, NULL, 0}};
    for (int option; (option = getopt_long(count, arguments, "", options, NULL)) != -1;) {
        if (option == 'r') plan.rate = atof(optarg);
        else if (option == 'n') plan.first = atol(optarg);
        else if (option == 'w') plan.words = atol(optarg);
        else if (option == 'm') plan.ramp_ns = (uint64_t)atol(optarg) * MS;
        else if (option == 'q') plan.requests = atol(optarg);
        else if (option == 'f') plan.fresh = true;
        else usage();
    }
    if (count - optind != 5) usage();
    plan.mode = mode_named(arguments[optind]);
    plan.port = atoi(arguments[optind + 1]);
    bodies = bodies_read(arguments[optind + 2]);
    plan.connections = (size_t)atol(arguments[optind + 3]);
    plan.seconds = atof(arguments[optind + 4]);
    if (plan.connections == 0 || (plan.mode == OPEN && plan.rate <= 0)) usage();
    connections = calloc(plan.connections, sizeof *connections);
    signal(SIGPIPE, SIG_IGN);
    be_punctual();
    if (plan.mode == HOLD) fcntl(STDIN_FILENO, F_SETFL, O_NONBLOCK);
    epoll = epoll_create1(0);
    run();
    print_found();
    return 0;
}

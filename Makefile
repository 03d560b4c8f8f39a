# `make demo`, `make test` and `make check` set up all they need; nothing has to be run before them.
VENV   := .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
ENGINE ?= sim
READY  := $(VENV)/.ready
PLAYS  := $(VENV)/.demo-ready
# Sources of the compiled modules; those of beliefs and sessions are Python with types of C beside it.
TYPED  := $(wildcard proxy/beliefs/*.pxd proxy/sessions/*.pxd)
PLANE  := $(wildcard $(addprefix proxy/plane/,*.pyx *.pxd *.h */*.[ch])) $(TYPED) $(TYPED:.pxd=.py)
BUILT  := proxy/plane/*.so proxy/beliefs/*.so proxy/sessions/*.so
JOBS   ?= 2
PYTEST := $(BIN)/python -m pytest
BESIDE := $(PYTEST) --numprocesses $(JOBS) --dist loadfile
# Tests with sockets and processes wait for most of their time, so there is room for two more beside them.
WAITING := $(PYTEST) --numprocesses $$(($(JOBS) + 2)) --dist loadfile
# What waits for real processes has limits of time, which a machine with other guests may exceed: a wait that ran out is
# tried once more, and named at the end. A wrong answer is not.
PATIENT := --reruns 1 --only-rerun '^Timeout(Error|Expired)' -raR

# Python may keep what it compiled: the next run collects its tests in half the time.
unexport PYTHONDONTWRITEBYTECODE

# Folders without a quick test are not even imported, and a table's rows are one test, which names those that fail:
# thousands of tests less. Without the option, each has a name of its own.
QUICK := -p no:schemathesis --whole-tables --ignore tests/e2e --ignore tests/fuzz --ignore tests/vllm

# What clients are promised, whichever data plane speaks to them: tested on both.
CONFORMANCE := $(patsubst %,tests/e2e/%.py,access/test_edge access/test_handshakes access/test_keys access/test_queue \
	access/test_web_pages failures/test_cancel_matrix \
	failures/test_dead_workers failures/test_drain failures/test_failures failures/test_fault_matrix \
	turns/test_conversations turns/test_hostile turns/test_pass_through_rules turns/test_prompt_lists)

.PHONY: demo test check types quick quick-proxy quick-rest e2e engines format sanitize clean browser chromium promtool redis

demo: $(PLAYS)
	$(BIN)/ppd demo --engine $(ENGINE) $(if $(PORT),--port $(PORT)) $(if $(MODEL),--model $(MODEL)) $(if $(ONCE),--once)

# Quick tests first: a broken rule shows in seconds, not after the engines have started.
test: $(READY)
	$(MAKE) --no-print-directory promtool redis check browser
	$(BESIDE) -m "(hypothesis or slow) and not alone" $(QUICK)
	$(MAKE) --no-print-directory --jobs=2 e2e engines
	$(WAITING) $(PATIENT) --data-plane asgi $(CONFORMANCE)
	$(PYTEST) --reruns 1 -raR -m alone tests/e2e
	$(MAKE) --no-print-directory sanitize
	$(PYTEST) $(PATIENT) -m vllm tests/vllm # beside one another they are too slow for their limits

e2e: $(READY)
	$(WAITING) $(PATIENT) --no-loadscope-reorder -m "(e2e or wheel) and not alone" --durations=25 --durations-min=5 \
		tests/test_wheel.py tests # the longest one first

# Real vLLM, while others wait: it takes a minute or two, once. What fails is said by the tests that need it.
engines: $(READY)
	-@$(BIN)/python -m ppd.servers.vllm.cpu_install >/dev/null

# The report is looked at in a real browser. PPD_CHROMIUM names another one.
browser:
	@for name in $$PPD_CHROMIUM chromium chromium-browser google-chrome; do command -v "$$name" >/dev/null && exit 0; done; \
		$(MAKE) --no-print-directory chromium

# Checks the alert rules. PPD_PROMTOOL names another one.
PROMTOOL := $(VENV)/promtool/usr/bin/promtool
promtool:
	@for name in $$PPD_PROMTOOL promtool $(PROMTOOL); do command -v "$$name" >/dev/null && exit 0; done; \
		$(MAKE) --no-print-directory $(PROMTOOL)

# Debian's package is unpacked, not installed: it would start a server.
$(PROMTOOL):
	@command -v apt-get >/dev/null || \
		{ echo "make test checks the alert rules: install promtool, or set PPD_PROMTOOL to it" >&2; exit 1; }
	@test "$$(id -u)" != 0 || apt-get update -qq
	@mkdir -p $(VENV)/promtool
	cd $(VENV)/promtool && apt-get download -qq prometheus && dpkg -x prometheus_*.deb . && rm prometheus_*.deb

# A real server for the encoder cache's tests. PPD_REDIS_SERVER names another one.
REDIS := $(VENV)/redis/usr/bin/redis-server
redis:
	@for name in $$PPD_REDIS_SERVER redis-server $(REDIS); do command -v "$$name" >/dev/null && exit 0; done; \
		$(MAKE) --no-print-directory $(REDIS)

# Unpacked as Prometheus' package, with its libraries: servers/ec_redis' tests say where they are.
$(REDIS):
	@command -v apt-get >/dev/null || \
		{ echo "make test needs a Redis server: install redis-server, or set PPD_REDIS_SERVER to it" >&2; exit 1; }
	@test "$$(id -u)" != 0 || apt-get update -qq
	@mkdir -p $(VENV)/redis
	cd $(VENV)/redis && apt-get download -qq redis-server redis-tools liblzf1 libjemalloc2 && \
		for package in *.deb; do dpkg -x $$package . && rm $$package || exit 1; done

chromium:
	@test "$$(id -u)" = 0 && command -v apt-get >/dev/null || \
		{ echo "make test looks at the report in Chromium: install it, or set PPD_CHROMIUM to a browser like it" >&2; exit 1; }
	apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory --jobs=3 --output-sync=target quick types

types: $(READY)
	$(BIN)/mypy

# Properties are checked on fewer examples than `make test` has for them.
# Two processes that each collect and import a half need a fifth less than xdist's, which each collect all.
quick: quick-proxy quick-rest
quick-proxy: HALF := tests/proxy
quick-rest: HALF := tests --ignore tests/proxy
quick-proxy quick-rest: $(READY)
	$(PYTEST) -q -m "not e2e and not wheel and not vllm and not alone and not slow" --hypothesis-profile quick $(QUICK) \
		-p no:anyio -p no:rerunfailures -p no:xdist $(HALF)

# The compiled modules with what finds wrong addresses and undefined behaviour, in a folder of their own, and tests that
# go through them. By way of the packed sources, so that nothing of it stays where the usual build looks.
SANITIZE  ?= tests/proxy/plane tests/proxy/beliefs tests/proxy/sessions/test_compiled.py \
	tests/proxy/gateway/test_messages.py tests/e2e/turns/test_conversations.py tests/e2e/turns/test_hostile.py \
	tests/e2e/processes/test_lessons.py
SANITIZED := $(CURDIR)/build/sanitized
# Undefined behaviour ends as an illegal instruction, so that it is reported in a file too: a proxy's own process may be
# the one that dies, and its stderr is a test's.
SANITIZER := -fsanitize=address,undefined -fsanitize-undefined-trap-on-error
# Memory is taken from malloc, piece by piece, or a read beyond a short text would stay unseen. Python itself leaks some.
SANITIZING = env PYTHONPATH=$(SANITIZED)/packages PYTHONMALLOC=malloc \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0:handle_segv=2:handle_sigill=2:log_path=$(SANITIZED)/report $(BIN)/python

sanitize: $(READY)
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	@CC=gcc CFLAGS="-O1 -g -fno-omit-frame-pointer $(SANITIZER)" LDFLAGS="$(SANITIZER)" \
		$(BIN)/python -m build --outdir $(SANITIZED) . >$(SANITIZED)/log 2>&1 || { cat $(SANITIZED)/log; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(SANITIZED)/packages $(SANITIZED)/*.whl
	$(SANITIZING) -c 'from ppd.proxy.plane import poller; assert "/sanitized/" in poller.__file__'
	$(SANITIZING) -m pytest --numprocesses $(JOBS) --dist loadfile -p no:schemathesis --data-plane native $(SANITIZE); \
		failed=$$?; \
		cat $(SANITIZED)/report* 2>/dev/null && exit 1 || exit $$failed

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The demo downloads 34 MB, the tests 280: each installs what it needs, and the tests' part has the demo's in it.
# Where only a source of the compiled modules is newer, they are built again and nothing else is installed.
$(PLAYS): pyproject.toml $(PLANE)
	@$(if $(filter pyproject.toml,$?),echo "$(FIRST_DEMO)")
	$(call install,$(if $(filter pyproject.toml,$?),'.[demo]',. --no-deps))
	@touch $@

$(READY): pyproject.toml $(PLANE)
	@$(if $(filter pyproject.toml,$?),echo "$(FIRST_TEST)")
	$(call install,$(if $(filter pyproject.toml,$?),'.[dev]',. --no-deps))
	@touch $@ $(PLAYS)

FIRST_DEMO := The demo's first run: installing PPD and OpenAI's client into $(VENV) (34 MB to download; make test needs more)
FIRST_TEST := Installing PPD with all that its tests need into $(VENV) (280 MB to download)

# A compiled module that fails to build is left out: neither in silence, nor for an older one of the same name.
define install
@rm -f $(BUILT)
@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
@echo "  pip install --editable $(1)"
@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable $(1)
@$(BIN)/python -c 'from ppd.proxy.plane import IS_BUILT; print(end="" if IS_BUILT else "$(UNBUILT)\n")'
endef

UNBUILT := The compiled modules are not built (pip install --verbose --no-deps --editable . says why): direct serves.

clean:
	rm -rf $(VENV) build dist $(BUILT) *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

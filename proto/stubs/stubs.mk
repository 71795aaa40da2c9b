# The stubs in a language of one's choice: `make stubs LANG=rust`. See proto/README.md.
#
# LANG is the locale as well, in everybody's environment: it is a language only where make's command line
# says so, and no program that make starts then sees it.

STUBS_LANGUAGES := cpp csharp go java kotlin php ruby rust typescript
ifeq ($(origin LANG),command line)
STUBS_LANGUAGE := $(LANG)
unexport LANG
endif
OUT := stubs/$(STUBS_LANGUAGE)

# What the generators need of what make installs.
STUBS_NEED_csharp := $(VENV)/.installed-dev
STUBS_NEED_go := $(PROTO_VENV)/.installed
STUBS_NEED_rust := $(PROTO_VENV)/.installed
STUBS_NEED_typescript := $(VENV)/.installed-dev $(NODE_DIR)/node_modules/.installed

.PHONY: stubs
ifneq ($(filter $(STUBS_LANGUAGES),$(STUBS_LANGUAGE)),)
stubs: $(STUBS_NEED_$(STUBS_LANGUAGE)) ## Generate stubs in another language: LANG=rust, to stubs/rust or OUT=DIR
	proto/stubs/generate $(STUBS_LANGUAGE) "$(OUT)"
	@echo "the stubs for $(STUBS_LANGUAGE) are in $(OUT)"
else
STUBS_WRONG := $(if $(STUBS_LANGUAGE),LANG is '$(STUBS_LANGUAGE)',say in which language with LANG=... on make's command line)
stubs:
	@echo "make stubs: $(STUBS_WRONG); it may be: $(STUBS_LANGUAGES)" >&2
	@false
endif

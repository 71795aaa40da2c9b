# The Go client's part of the Makefile. What it needs: Go 1.23 or newer; staticcheck asks for its own,
# newer toolchain, which `go` fetches by itself.

GO_TOOLS := $(CURDIR)/.cache/go-tools
STATICCHECK_VERSION := v0.7.0
GO_STUBS := client/go/anarchonv1

.PHONY: check-go
check-go: $(PROTO_VENV)/.installed $(GO_TOOLS)/staticcheck-$(STATICCHECK_VERSION) ## The Go client: format, vet, staticcheck, fresh stubs
	@cd client/go && wrong=$$(gofmt -l .) && { [ -z "$$wrong" ] || { echo "gofmt these: $$wrong" >&2; exit 1; }; }
	cd client/go && go mod tidy -diff && go vet ./... && $(GO_TOOLS)/staticcheck-$(STATICCHECK_VERSION) ./...
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && client/go/generate "$$fresh" \
		&& { diff -rq "$$fresh/anarchonv1" $(GO_STUBS) \
		|| { echo "The stubs in $(GO_STUBS) are stale: run 'make proto-go' and commit them." >&2; exit 1; }; }

.PHONY: test-go
test-go: ## The Go client's own tests; with the race detector where there is a C compiler
	cd client/go && go test $(if $(shell command -v gcc),-race) ./...

.PHONY: proto-go
proto-go: $(PROTO_VENV)/.installed ## Generate the Go stubs anew
	client/go/generate client/go

$(GO_TOOLS)/staticcheck-$(STATICCHECK_VERSION):
	GOBIN=$(GO_TOOLS) go install honnef.co/go/tools/cmd/staticcheck@$(STATICCHECK_VERSION)
	mv $(GO_TOOLS)/staticcheck $@

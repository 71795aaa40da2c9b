package anarchon

import (
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
)

func TestAnAddressThatIsNoneIsRefused(t *testing.T) {
	for address, want := range map[string]string{
		"nowhere":                           `must be "host:port"`,
		"host:0":                            `must be "host:port"`,
		"host:70000":                        `must be "host:port"`,
		"unix:relative":                     "must be unix:/absolute/path",
		"unix:/" + strings.Repeat("x", 107): "at most 107 bytes",
		"10.0.0.1:7420":                     "calls to it need TLS",
		"anarchon.example:7420":             "calls to it need TLS",
	} {
		if _, err := New(WithAddress(address)); !errors.Is(err, ErrClient) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %q", address, err, want)
		}
	}
	for _, address := range []string{"localhost:1", "127.0.0.2:7420", "[::1]:7420", "unix:/run/anarchon/socket"} {
		if _, err := New(WithAddress(address)); err != nil {
			t.Errorf("%s: %v", address, err)
		}
	}
	if _, err := New(WithAddress("10.0.0.1:7420"), WithCredentials(credentials.NewTLS(nil))); err != nil {
		t.Error(err)
	}
}

func TestTheEnvironmentHasAddressAndTokenFile(t *testing.T) {
	t.Setenv("ANARCHON_ADDRESS", "127.0.0.1:7421")
	t.Setenv("ANARCHON_TOKEN_FILE", "/nowhere/token")
	if _, err := New(); !errors.Is(err, ErrClient) || !strings.Contains(err.Error(), `token file "/nowhere/token"`) {
		t.Error(err)
	}
	t.Setenv("ANARCHON_TOKEN_FILE", "")
	client, err := New()
	if err != nil || client.endpoint.address != "127.0.0.1:7421" {
		t.Error(client, err)
	}
}

func TestASocketThatOthersMayHavePutThereIsNotCalled(t *testing.T) {
	directory := t.TempDir()
	socket := filepath.Join(directory, "s")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if err := os.Chmod(directory, 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := New(WithAddress("unix:" + socket)); !errors.Is(err, ErrClient) ||
		!strings.Contains(err.Error(), "nobody else may write in the directory") {
		t.Error(err)
	}
	if err := os.Chmod(directory, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := New(WithAddress("unix:" + socket)); err != nil {
		t.Error(err)
	}
}

func TestTheCallTokenIsReadAgainWhenItsFileHasChanged(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	replace := func(text string) {
		t.Helper()
		if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	replace("\n  first \nsecond\n")
	var said strings.Builder
	token, err := newCallToken(file, slog.New(slog.NewTextHandler(&said, nil)))
	if err != nil || token.current() != "first" {
		t.Fatal(token, err)
	}
	replace("second\n")
	if got := token.current(); got != "second" {
		t.Error(got)
	}
	replace("with space\n")
	if got := token.current(); got != "second" || !strings.Contains(said.String(), "printable ASCII") {
		t.Error(got, said.String())
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if got := token.current(); got != "second" {
		t.Error(got)
	}
	if _, err := newCallToken(file, slog.Default()); !errors.Is(err, ErrClient) {
		t.Error(err)
	}
}

func TestTheReasonDecidesWhatAStatusMeansElseTheCode(t *testing.T) {
	for _, each := range []struct {
		code   codes.Code
		reason string
		is     []error
	}{
		{codes.InvalidArgument, "", []error{ErrRefused}},
		{codes.FailedPrecondition, "UNSUPPORTED", []error{ErrRefused, ErrUnsupported}},
		{codes.FailedPrecondition, "VERSION", []error{ErrRefused, ErrVersion}},
		{codes.Unimplemented, "", []error{ErrRefused, ErrVersion}},
		{codes.Unauthenticated, "BAD_CREDENTIALS", []error{ErrRefused, ErrCredentials}},
		{codes.PermissionDenied, "", []error{ErrRefused, ErrCredentials}},
		{codes.ResourceExhausted, "LIMIT_EXCEEDED", []error{ErrRefused}},
		{codes.NotFound, "SESSION_NOT_FOUND", []error{ErrSessionNotFound}},
		{codes.NotFound, "JOB_NOT_FOUND", []error{ErrNotFound}},
		{codes.Aborted, "SESSION_REPLACED", []error{ErrSessionReplaced}},
		{codes.Aborted, "", []error{ErrUnavailable}},
		{codes.Internal, "LATER_WORD", []error{ErrUnavailable}},
		{codes.InvalidArgument, "LATER_WORD", []error{ErrRefused}},
	} {
		err := sidecarError(each.code, each.reason, "words")
		for _, is := range each.is {
			if !errors.Is(err, is) {
				t.Errorf("%v %s: is no %v", each.code, each.reason, is)
			}
		}
		if len(each.is) == 1 && each.is[0] != ErrRefused && errors.Is(err, ErrRefused) {
			t.Errorf("%v %s: is refused", each.code, each.reason)
		}
	}
}

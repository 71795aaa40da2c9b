// Package anarchon runs the scheduled jobs of a Go service that has many instances: each scheduled
// time on exactly one of them.
//
// A sidecar beside every instance decides who runs what; this package is the application's side of
// it. It offers jobs, is handed runs, calls their handlers and reports how they ended:
//
//	sync := anarchon.Every("sync", 10*time.Second, func(ctx context.Context, run *anarchon.Run) error {
//		return nil
//	})
//	err := anarchon.New().Run(context.Background(), sync)
//
// The words (job, slot, run, attempt, token, fence, lease, session, trust) and all rules are those
// of the client specification, client/README.md of the project.
//
// # Files
//
// session.go decides everything, and does no I/O: it takes facts and a time, and returns commands.
// client.go carries them out, with runner.go for handlers and transport.go for calls. jobs.go makes
// job specs, run.go is what a handler sees, admin.go asks a sidecar what there is.
package anarchon

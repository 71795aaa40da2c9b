-- The early end of leases (S17, S19, S23 to S25, `machine.judge_release`).

return reply({
  answers = answers_of(batch.items, function(release, key)
    local run = load_run(key, release.job, release.slot)
    if not run or run.attempt == 0 then
      return { outcome = 'unknown_token', run = shown(run) }
    end
    local ours = run.token == release.token and run.incarnation == release.incarnation
    if not ours or FINAL[run.state] or run.state == 'retrying' then
      return { outcome = 'fenced', run = shown(run) }
    end
    if run.freed == '' then
      free(run, release.reason)
      save_run(key, run)
    end
    return { outcome = 'released', run = shown(run) }
  end),
})

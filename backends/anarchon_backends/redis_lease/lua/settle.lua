-- What is to become of slots that nobody claimed in time (S20).

return reply({
  answers = answers_of(batch.items, function(plan, key)
    local job = load_job(key, plan.schedule_id)
    return carry_out(plan, key, job, caught_up_runs(key, plan.job), NOW)
  end),
})
